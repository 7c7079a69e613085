"""Every claim of the README: its sentence, its stored results, its rerun.

A sentence is a template of the figures that come from stored rows (`figures`); nothing in it is typed in by hand but
what the rows are of. Where the rows do not support more, the sentence says less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.claims import figures

__all__ = ["CLAIMS", "ROOT", "Claim", "Rerun"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Rerun:
    """A command that measures a reduced set, and what it writes; `{out}` is a folder of its own."""

    command: tuple[str, ...]
    writes: str
    """A pattern in that folder."""
    seconds: float
    then: tuple[str, ...] = ()
    """A second command."""


@dataclass(frozen=True)
class Claim:
    """One line of the README."""

    benchmark: str
    stored: tuple[str, ...]
    """Result files in the benchmark's folder, oldest first."""
    figures: Callable[[Sequence[Any]], dict[str, Any]]
    sentence: str
    short: str
    """The figures alone, for a table of stored beside today's."""
    same: tuple[str, ...] = ()
    """What names a row, so that today's rows are set beside the same stored ones."""
    rerun: Rerun | None = None
    why_not: str = field(default="")
    """Why it has no rerun."""

    @property
    def paths(self) -> tuple[Path, ...]:
        folder = ROOT / "benchmarks" / self.benchmark
        return tuple(path for name in self.stored for path in sorted(folder.glob(name)))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "within-default",
        (
            "results/2026-11-17-wall-rehearsed.json",
            "results/2026-11-17-wall-four-steps-tried.json",
            "results/2026-11-17-wall-graphs-with-less.json",
            "results/2026-11-17-wall-by-step.json",
            "results/2026-11-17-wall-trial-repeats-training.json",
            "results/2026-11-17-wall-captures-abandoned.json",
            "results/2026-11-17-wall-process-limit.json",
        ),
        figures.by_default,
        "`within` by default at half of plain's reserved memory, bf16, {networks} networks: {median:.2f}x the time "
        "of plain call by call in the median, {fastest:.2f}x to {slowest:.2f}x ({slow}; out of memory: {failed}); "
        "all gradients bitwise in {bitwise} of {done}; as a hard limit it held strictly for {held}",
        "{median:.2f}x median, worst {slowest:.2f}x, failed {failed}, held {held} of {networks}",
        ("network",),
        Rerun(
            (
                "benchmarks/within-default/run.py",
                "--out",
                "{out}",
                "--wall",
                "--seconds",
                "80",
                "--only",
                "resnet50 64x224",
                "swin_t 64x224",
                "vgg16_bn 32x224",
                "unet3d 2x96",
            ),
            "default-*.json",
            130,
        ),
    ),
    Claim(
        "frontier",
        ("results/*.jsonl",),
        figures.frontier,
        "Half of plain's reserved memory by the public call, {cases} cases of large inputs and batches: {half:.2f}x "
        "the time in the median, {half_best:.2f}x to {half_worst:.2f}x; with `compile=True` {compiled:.2f}x, "
        "{compiled_best:.2f}x to {compiled_worst:.2f}x; as fast as torch.compile at its memory in {ahead} of "
        "{compared} points; {within} of {rows} peaks within their budget",
        "half {half:.2f}x ({half_best:.2f} to {half_worst:.2f}), compiled {compiled:.2f}x, level with compile "
        "{ahead}/{compared}, peaks {within}/{rows}",
        ("case", "way"),
        Rerun(
            (
                "-m",
                "benchmarks.frontier",
                "--out",
                "{out}",
                "--networks",
                "resnet50,gpt",
                "--sizes",
                "large",
                "--precisions",
                "bf16",
                "--tiers",
                "a",
                "--seconds",
                "140",
            ),
            "rows.jsonl",
            160,
        ),
    ),
    Claim(
        "within-compiled",
        ("results/2026-11-17-h200-resnet50.json",),
        figures.compiled,
        "torch.compile's kernels, ResNet-50 on one image of 4096 px: {ours_gib:.1f} GiB and {ours_ms:.0f} ms, where "
        "torch.compile's own smallest is {peer_gib:.1f} GiB and {peer_ms:.0f} ms ({networks} network)",
        "{ours_gib:.1f} GiB {ours_ms:.0f} ms, torch.compile {peer_gib:.1f} GiB {peer_ms:.0f} ms",
        why_not="the frontier's rerun has it",
    ),
    Claim(
        "within-largest",
        ("results/*.json",),
        figures.largest,
        "Largest ResNet-50 step in 11 GiB, TF32: batch {batch_outcore} against plain's {batch_plain}; image "
        "{image_outcore:,} px (by the engine before) against {image_plain:,}",
        "batch {batch_outcore:.0f} against {batch_plain:.0f}; image {image_outcore:.0f} against {image_plain:.0f}",
        ("limit", "grows", "how"),
        Rerun(("benchmarks/within-largest/public_call.py", "--out", "{out}", "--seconds", "90"), "largest.json", 110),
    ),
    Claim(
        "step-prediction",
        (
            "results/2026-11-15-cuda-quiet.json",
            "results/2026-11-15-cuda-small-batches.json",
            "results/2026-11-16-cuda.json",
            "results/2026-11-17-peak-before.json",
        ),
        figures.predictions,
        "Predicted over all {cases} cases of three runs, small batches and a shared host among them: step time by "
        "estimate within {estimate:.1%} in the median, {estimate_worst:.0%} at worst; from measured calls "
        "{measured:.1%}, {measured_worst:.0%}; peak memory from them {peak:.1%}, {peak_worst:.1%}, with nothing run "
        "{before:.1%}, {before_worst:.0%} ({befores} cases)",
        "peak {peak:.1%}, {peak_worst:.1%}; estimate {estimate:.1%}, {estimate_worst:.0%}; measured calls "
        "{measured:.1%}, {measured_worst:.0%}",
        ("network", "batch", "precision"),
        Rerun(
            (
                "benchmarks/step-prediction/run.py",
                "--out",
                "{out}",
                "--no-peers",
                "--limit",
                "35",
                "--bound",
                "both",
                "--only",
                "ResNet-50",
                "Swin-T",
            ),
            "*cuda.json",
            70,
        ),
    ),
    Claim(
        "zoo-capture",
        ("2026-11-15.json",),
        figures.captured,
        "{equal} of {models} foreign models captured and replayed bitwise, {seconds:.2f} s in the median (CPU)",
        "{equal} of {models}, {seconds:.2f} s",
        ("model",),
        Rerun(
            ("benchmarks/zoo-capture/run.py", "--no-peers", "--only", "torchvision/res", "--out", "{out}/zoo.json"),
            "zoo.json",
            90,
        ),
    ),
    Claim(
        "stream-resnet50-slide",
        ("results/2026-11-15-h200-channels-last.json",),
        figures.slide,
        "One exact training step of ResNet-50 on a slide of 100,000 x 100,000 px: {seconds:.1f} s within {gib:.1f} "
        "GiB (one step was taken); at 8192 px {fastest:.2f}x to {slowest:.2f}x plain's time by where tiles end, the "
        "fastest of two steps each",
        "8192 px {fastest:.2f}x to {slowest:.2f}x",
        ("side", "how", "boundary"),
        Rerun(
            (
                "benchmarks/stream-resnet50-slide/run.py",
                "--sides",
                "8192",
                "--boundaries",
                ",layer3,layer2",
                "--repeats",
                "5",
                "--cap",
                "40GiB",
                "--seconds",
                "40",
                "--output",
                "{out}/slide.json",
            ),
            "slide.json",
            70,
        ),
    ),
    Claim(
        "engine-schedules",
        ("results/2026-11-15-h200-mps-2-ranks.json", "results/2026-11-15-h200-mps-4-ranks.json"),
        figures.pipelines,
        "Pipelines of 2 and 4 ranks on one GPU: {lowest:.1%} to {highest:.1%} above the closed form, {schedules} runs",
        "{lowest:.1%} to {highest:.1%} above",
        why_not="needs MPS, which a script cannot start everywhere",
    ),
    Claim(
        "partition-balance",
        ("2026-11-15-measured.json",),
        figures.partitions,
        "Pipeline stages by measured time (CPU), over torchgpipe's: slowest stage {time_best:.2f}x to "
        "{time_worst:.2f}x, largest peak {memory_best:.2f}x to {memory_worst:.2f}x, {cases} cases",
        "{time_best:.2f}x to {time_worst:.2f}x, memory {memory_best:.2f}x to {memory_worst:.2f}x",
        why_not="measured on a CPU",
    ),
    Claim(
        "fuse-throughput",
        ("results/2026-11-16-h200-all.json",),
        figures.fused,
        "Sixteen models as one, {workloads} workloads of one run: {plain_worst:.1f}x to {plain_best:.0f}x over one "
        "after the other in plain PyTorch, {graphed_worst:.1f}x to {graphed_best:.1f}x (mean {graphed_mean:.1f}x) "
        "in CUDA graphs",
        "{plain_worst:.1f}x to {plain_best:.0f}x, graphs {graphed_worst:.1f}x to {graphed_best:.1f}x",
        ("workload", "precision"),
        Rerun(
            (
                "benchmarks/fuse-throughput/run.py",
                "--out",
                "{out}/fuse.json",
                "--counts",
                "16",
                "--limit",
                "60",
                "--tasks",
                "resnet18-b32/tf32:curve; lstm-b32/tf32:curve; dcgan-b64/tf32:curve",
            ),
            "fuse.json",
            90,
        ),
    ),
    Claim(
        "rnn-scan",
        ("results/2026-11-16-graphs.json", "results/2026-11-16-rest.json"),
        figures.scanned,
        "RNN of 20 hidden units, batch 16, over 30,000 steps, over cuDNN's in CUDA graphs: backward "
        "{backward:.0f}x, step {step:.1f}x; with 256 units the scan is slower ({wide:.2f}x) and cuDNN's is taken "
        "({wide_automatic:.2f}x)",
        "backward {backward:.0f}x, step {step:.1f}x",
        (),
        Rerun(("benchmarks/rnn-scan/run.py", "--part", "graphs", "--out", "{out}", "--seconds", "40"), "*.json", 90),
    ),
    Claim(
        "conv-time",
        ("results/2026-11-16-nvidia-h200.json",),
        figures.convolutions,
        "Convolutions that the calibration has not seen, all {count:,}: median error {lowest:.1%} to {highest:.1%} "
        "by group, worst {worst:.0%}",
        "{lowest:.1%} to {highest:.1%}, worst {worst:.0%}",
        why_not="a calibration takes five minutes",
    ),
)
