import time, torch
from ckptrain.megatron.dora import added_squares, _chunks
def old(weight, lora_a, lora_b, scale):
    product = torch.cat([chunk.float() @ lora_a.mT for chunk in _chunks(weight)])
    return ((2 * scale * product + scale**2 * (lora_b @ (lora_a @ lora_a.mT))) * lora_b).sum(1)
for rows, cols in ((2048, 2048), (8192, 2048), (2048, 8192), (1024, 2048), (14336, 4096)):
    w = torch.randn(rows, cols, device="cuda").bfloat16() * 0.02
    a = (torch.randn(16, cols, device="cuda") * 0.1).bfloat16().float(); b = (torch.randn(rows, 16, device="cuda") * 0.1).bfloat16().float()
    exact = (w.double() + 2 * b.double() @ a.double()).square().sum(1) - w.double().square().sum(1)
    for f in (old, added_squares):
        got = f(w, a, b, 2.0)
        torch.cuda.synchronize(); t = time.time()
        for _ in range(50): f(w, a, b, 2.0)
        torch.cuda.synchronize()
        print(rows, cols, f.__name__, f"{(time.time()-t)/50*1e6:.0f} us", float(((got.double() - exact) / (w.double().square().sum(1) + exact)).abs().max()))
