# SPDX-License-Identifier: Apache-2.0
"""Pictures of simulated runs: a figure of distributions for all settings, and one of the cluster over time for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullFormatter

from llumsim.cluster.metrics import Gaps, Metrics, Summary

Results = Sequence[tuple[str, Summary, Metrics]]


def plot(directory: Path, results: Results) -> list[Path]:
    """Returns the files that were written."""
    directory.mkdir(parents=True, exist_ok=True)
    return [_distributions(directory, results), *(_over_time(directory, *result) for result in results)]


def _distributions(directory: Path, results: Results) -> Path:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for setting, _, metrics in results:
        for axis, values in ((axes[0], metrics.ttft_s), (axes[1], metrics.tpot_s)):
            ordered = np.sort(np.asarray(values))
            axis.plot(ordered, 1 - np.arange(len(ordered)) / max(len(ordered), 1), label=setting)
        axes[2].plot(*_exceeded(metrics.gaps), label=setting)
    for axis, title in zip(axes, ("TTFT", "TPOT", "gap between two tokens, pooled"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="seconds", ylabel="share that takes longer", title=title)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    axes[0].legend()
    return _saved(figure, directory / "distributions.png")


def _exceeded(gaps: Gaps) -> tuple[list[float], list[float]]:
    """Sizes in seconds, and the share of gaps that are larger."""
    sizes, shares, left = [], [], gaps.number
    for size, count in enumerate(gaps.counts):
        if count:
            left -= count
            sizes.append(1e-6 * math.exp(size * math.log(1.01)))
            shares.append(left / gaps.number)
    return sizes, shares


def _over_time(directory: Path, setting: str, summary: Summary, metrics: Metrics) -> Path:
    figure, (above, below) = plt.subplots(2, 1, figsize=(12, 7), sharex=True, layout="constrained")
    at_s = [sample.at_s for sample in metrics.samples]
    same = {len(sample.loads) for sample in metrics.samples if sample.loads}
    if len(same) == 1:
        loads = np.array([sample.loads for sample in metrics.samples])
        shown = above.imshow(
            loads.T, aspect="auto", vmin=0, vmax=1, extent=(at_s[0], at_s[-1], loads.shape[1] - 0.5, -0.5), cmap="magma"
        )
        above.set(ylabel="instance", title=f"{setting}: KV cache in use")
        figure.colorbar(shown, ax=above)
    else:
        above.plot(at_s, [sample.used_share for sample in metrics.samples])
        above.set(ylabel="share", title=f"{setting}: KV cache in use, all instances")
    below.plot(at_s, [sample.num_waiting for sample in metrics.samples], label="waiting requests")
    below.plot(at_s, [sample.num_running for sample in metrics.samples], label="running requests")
    below.set(xlabel=f"seconds (last request ends at {summary.virtual_s:.0f})", yscale="symlog")
    below.legend()
    below.grid(alpha=0.3)
    return _saved(figure, directory / f"{Path(setting).name}.png")


def _saved(figure: plt.Figure, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
