"""What several test rooms share: a tiny model with a tokenizer, and a launcher of forked ranks."""
