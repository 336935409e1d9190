"""The loss function of a program: what it is given, and whether it gives what a loss must.

It gets logits that are whole: gathered from tensor parallel processes, without the rows that pad the vocabulary, and
not in portions as the fused loss has them. So any function of torch will do, at the price of their memory.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from ckptrain.errors import ConfigError

_TRIED_TOKENS = 3


@attrs.frozen(kw_only=True)
class OwnLoss:
    """A function in the place of cross-entropy."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    vocab_size: int
    """Without padding for tensor parallelism."""

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of tokens, float32 [tokens].

        The function is not called where there are none: a mean of nothing would be no number.

        Args:
            logits: float32 [tokens, vocabulary], padded at its end or not.
            labels: int64 [tokens].

        Raises:
            ConfigError: it does not give the loss of each token.
        """
        if not len(labels):
            return logits.sum(1)
        losses = self.function(logits[:, : self.vocab_size], labels)
        if problem := _problem(losses, labels):
            raise self._refused(problem)
        return losses.float()

    def _refused(self, problem: str) -> ConfigError:
        return ConfigError(f"the loss {self.name!r} cannot be used", [problem])


def check_loss(loss: OwnLoss, device: torch.device | str) -> None:
    """Try a loss on three made-up tokens, together and one by one; nothing is drawn from the generators of the run.

    Raises:
        ConfigError: it fails, does not give the loss of each token with a gradient, or that of one depends on others.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TRIED_TOKENS, loss.vocab_size, generator=generator).to(device).requires_grad_()
    labels = torch.randint(loss.vocab_size, (_TRIED_TOKENS,), generator=generator).to(device)
    devices = [logits.device] if logits.is_cuda else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        try:
            together = loss.of(logits, labels)
            one_by_one = torch.cat([loss.of(logits[[i]], labels[[i]]) for i in range(_TRIED_TOKENS)])
        except ConfigError:
            raise
        except Exception as error:
            raise loss._refused(f"it raises {type(error).__name__}: {error}") from error
    if not together.requires_grad:
        raise loss._refused("what it returns has no gradient, so nothing would be learnt; compute it from the logits")
    if not torch.allclose(together, one_by_one, rtol=1e-3, atol=1e-5):
        raise loss._refused(
            f"the losses of three tokens are {_shown(together)} together and {_shown(one_by_one)} one by one: which"
            " come together is a matter of the layout, so the loss of a token may depend on its own row alone; ckptrain"
            " takes the mean over the global batch"
        )


def _problem(losses: object, labels: Tensor) -> str | None:
    if not isinstance(losses, Tensor):
        return f"it returned {type(losses).__name__}, expected a tensor with the loss of each token"
    if losses.shape != labels.shape:
        return (
            f"it returned a tensor of shape {list(losses.shape)} for {len(labels)} tokens, expected the loss of each,"
            f" {list(labels.shape)}: neither their sum nor their mean"
        )
    if not losses.is_floating_point():
        return f"it returned {losses.dtype}, expected floating point"
    return None


def _shown(losses: Tensor) -> str:
    return ", ".join(f"{loss:.4g}" for loss in losses.tolist())
