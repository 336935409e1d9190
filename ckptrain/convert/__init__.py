"""How do others read it?

From a checkpoint to Hugging Face PEFT, and the comparison of logits that shows a conversion to be right. It stands on
`megatron` and `checkpoint`; `training` and `cli` use it.
"""
