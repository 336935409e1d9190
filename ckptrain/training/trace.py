"""Where did a step go? A table out of a trace of torch's profiler, by kind of work.

On a GPU kernels are told apart by their names, and every moment of a step belongs to one kind: where kernels of several
run at once, the first in the order of `KINDS` counts, so communication is what nothing else hid, and idle what no
kernel ran in. On a CPU it is the time of torch's operators without those that they called.

The format is Chrome's trace events (cat, name, ts and dur in microseconds, tid), as Kineto writes them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

STEP_MARK = "ckptrain.step"
"""The name of the range that a step is recorded in."""

MATRIX, ATTENTION, ELEMENTWISE = "matrix products", "attention", "elementwise, norms, sums"
OPTIMIZER, COPIES, OTHER, COMMUNICATION = "optimizer", "copies", "other kernels", "communication"
IDLE, HOST = "idle", "Python and autograd"
KINDS = (MATRIX, ATTENTION, OPTIMIZER, ELEMENTWISE, COPIES, OTHER, COMMUNICATION)

# The first that is found in a name decides: cuDNN's attention kernels have `wgmma` in theirs.
_KERNELS = (
    (COMMUNICATION, r"nccl|nvshmem|all_?reduce|all_?gather|reduce_scatter|sendrecv"),
    (ATTENTION, r"fmha|flash|sdpa|attention|attn|mha_|cudnn::fusion"),
    (MATRIX, r"gemm|cutlass|nvjet|cublas|xmma|gemv|splitk|wgmma|matmul|_mm_|bmm"),
    (OPTIMIZER, r"multi_tensor|adam|l2norm"),
    (COPIES, r"memcpy|memset|copy|CatArray|fill|transpose"),
    # Kernels of our own are Triton's, named as functions of Python.
    (ELEMENTWISE, r"^_\w+$|triton|elementwise|norm|reduce|softmax|_kernel|rope|at::native|transformer_engine::"),
)
_OPERATORS = (
    (COMMUNICATION, r"^(c10d|gloo|nccl)|record_param_comms"),
    (ATTENTION, r"scaled_dot_product|flash_attention|efficient_attention"),
    (OPTIMIZER, r"^Optimizer\.|_fused_adam|_foreach_"),
    (MATRIX, r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|mv|dot|mkldnn_linear)"),
    (COPIES, r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|fill_|zero_|index_put_?)$"),
    (ELEMENTWISE, r"^aten::"),
)
# What an operator is part of may decide: attention is made of matrix products, the optimizer of sums.
_DECIDING = (ATTENTION, OPTIMIZER, COMMUNICATION)
_WAITING = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy$")
_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_NAMES = 15

type Span = tuple[float, float]


@attrs.frozen(kw_only=True)
class Profile:
    """What an average step of those recorded went into; all times are seconds."""

    device: str
    """cuda or cpu: what was looked at."""
    first_step: int
    num_steps: int
    step_s: float
    kinds: dict[str, float]
    """They add up to step_s."""
    hidden_communication_s: float
    """Communication on the device beside other kernels."""
    host_busy_s: float
    """Seconds in which the process did not wait for the device: near step_s, it is the host that is too slow."""
    names: tuple[tuple[str, str, int, float], ...]
    """What took longest: kernel or operator, its kind, how often in a step, seconds."""

    def table(self) -> str:
        """Lay it out in lines."""
        last = self.first_step + self.num_steps - 1
        lines = [f"steps {self.first_step} to {last} on {self.device}: {self.step_s * 1e3:.2f} ms each", ""]
        lines += [f"{'':28}{'ms':>10}{'share':>9}"]
        lines += [_line(kind, seconds, self.step_s) for kind, seconds in self.kinds.items()]
        if self.device == "cuda":
            lines += ["", _line("host busy", self.host_busy_s, self.step_s)]
            lines += [_line("communication hidden", self.hidden_communication_s, self.step_s)]
        lines += ["", f"{'ms':>10}{'calls':>8}  what (kind)"]
        lines += [f"{seconds * 1e3:10.2f}{count:8d}  {name[:90]} ({kind})" for name, kind, count, seconds in self.names]
        return "\n".join(lines) + "\n"


def _line(name: str, seconds: float, whole: float) -> str:
    return f"{name:28}{seconds * 1e3:10.2f}{seconds / whole:9.1%}"


def profile_of(events: Iterable[Mapping[str, Any]], first_step: int) -> Profile:
    """Read the events of a trace in which each step is a range named STEP_MARK."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in complete if event["name"] == STEP_MARK and event.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError(f"the trace has no range {STEP_MARK}")
    window = (min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps))
    inside = [event for event in complete if window[0] <= event["ts"] < window[1]]
    on_device = [event for event in inside if event.get("cat") in _DEVICE_EVENTS]
    own = [event for event in inside if event.get("tid") == steps[0]["tid"]]
    microseconds, hidden, names = _device_kinds(on_device, window) if on_device else _operator_kinds(own, window)
    waited = sum(event["dur"] for event in own if _WAITING.search(event["name"]))
    share = 1e-6 / len(steps)
    return Profile(
        device="cuda" if on_device else "cpu",
        first_step=first_step,
        num_steps=len(steps),
        step_s=(window[1] - window[0]) * share,
        kinds={kind: value * share for kind, value in microseconds.items()},
        hidden_communication_s=hidden * share,
        host_busy_s=(window[1] - window[0] - waited) * share,
        names=tuple((name, kind, round(count / len(steps)), value * share) for name, kind, count, value in names),
    )


def kind_of_kernel(name: str) -> str:
    """Return the kind of a CUDA kernel."""
    return next((kind for kind, pattern in _KERNELS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def _kind_of_operator(name: str) -> str:
    return next((kind for kind, pattern in _OPERATORS if re.search(pattern, name)), HOST)


def _device_kinds(
    events: Sequence[Mapping[str, Any]], window: Span
) -> tuple[dict[str, float], float, list[tuple[str, str, int, float]]]:
    """Return microseconds by kind, those of communication that something hid, and the names that took longest."""
    spans: dict[str, list[Span]] = defaultdict(list)
    took: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for event in events:
        kind = kind_of_kernel(event["name"])
        spans[kind].append((event["ts"], min(event["ts"] + event["dur"], window[1])))
        took[event["name"], kind] += event["dur"]
        calls[event["name"], kind] += 1
    covered: list[Span] = []
    kinds = {}
    for kind in KINDS:
        both = _merged([*covered, *spans[kind]])
        kinds[kind] = _length(both) - _length(covered)
        covered = both
    hidden = _length(_merged(spans[COMMUNICATION])) - kinds[COMMUNICATION]
    kinds[IDLE] = window[1] - window[0] - _length(covered)
    return kinds, hidden, [(*key, calls[key], value) for key, value in took.most_common(_MOST_NAMES)]


def _operator_kinds(
    events: Sequence[Mapping[str, Any]], window: Span
) -> tuple[dict[str, float], float, list[tuple[str, str, int, float]]]:
    """Return microseconds by kind of the operators of one thread, and the names that took longest."""
    kinds: Counter[str] = Counter(dict.fromkeys(KINDS, 0.0))
    took: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    around: list[tuple[float, str, str]] = []  # (end, kind, name) of what the present operator was called by
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["name"] == STEP_MARK:
            continue
        end = event["ts"] + event["dur"]
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        kind = _kind_of_operator(event["name"])
        if around:
            _, outer, outer_name = around[-1]
            kind = outer if outer in _DECIDING else kind
            kinds[outer] -= event["dur"]
            took[outer_name, outer] -= event["dur"]
        kinds[kind] += event["dur"]
        took[event["name"], kind] += event["dur"]
        calls[event["name"], kind] += 1
        around.append((end, kind, event["name"]))
    within = {kind: kinds[kind] for kind in KINDS if kind != OTHER}
    rest = window[1] - window[0] - sum(within.values())
    return {**within, HOST: rest}, 0.0, [(*key, calls[key], value) for key, value in took.most_common(_MOST_NAMES)]


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, as spans that do not touch."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
