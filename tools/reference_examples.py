"""docs/reference/examples.md: what each file of examples/ shows, and its text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
# In the order of reading: the file, and what it needs.
NEEDS: Mapping[str, str] = {
    "quickstart.yaml": "a CPU, two to three minutes",
    "train_on.yaml": "a CPU, and an export of the quickstart",
    "kill_and_resume.py": "a CPU, six minutes",
    "embed.py": "a CPU, four minutes",
    "embed_trainer.py": "a CPU, four minutes",
    "embed_own.py": "a CPU, two minutes",
    "pipeline.py": "a CPU, four minutes for the quickstart",
    "squad_lora.yaml": "one GPU; the Hub, or the model and the dataset in directories",
    "tulu3_lora.yaml": "eight GPUs; the Hub, or the model and the dataset in directories",
    "slurm.sh": "Slurm, with GPUs and a disk that all nodes see",
    "clusters/kubernetes.yaml": "Kubernetes 1.31, a node with eight GPUs, a volume and an image of yours",
    "clusters/kubernetes_nodes.yaml": "the same, and several nodes that can write to the volume",
    "clusters/skypilot.yaml": "SkyPilot 0.11 and a cloud",
    "templates/question_answer.jinja": "nothing: `squad_lora.yaml` uses it",
    "templates/llama3.jinja": "nothing: `tulu3_lora.yaml` uses it",
    "make_tickets.py": "nothing: it made `examples/data`, the quickstart's data",
}
LANGUAGES = {".yaml": "yaml", ".py": "py", ".sh": "sh", ".jinja": "jinja"}
HEAD = """# Examples

The files of `examples/`, as they are. The tests run each on a tiny model.

| file | needs |
|---|---|
"""


def examples_page() -> str:
    """Return the page.

    The languages of its blocks are not those of the blocks that a test runs: the files are run by tests of their own.
    """
    rows = "".join(f"| [`{name}`](#{anchor(name)}) | {needs} |\n" for name, needs in NEEDS.items())
    return HEAD + rows + "".join(_part(name) for name in NEEDS)


def anchor(name: str) -> str:
    """Return the anchor of a file's heading, as it is made of `title`."""
    return title(name).replace(" ", "-")


def title(name: str) -> str:
    """Return the heading of a file: its name, without what an anchor cannot hold."""
    return name.rpartition("/")[2].partition(".")[0].replace("_", " ")


def _part(name: str) -> str:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    return f"\n## {title(name)}\n\n`examples/{name}`\n\n```{LANGUAGES[Path(name).suffix]}\n{text}```\n"
