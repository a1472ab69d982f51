"""From seconds per round to figures, a table, and a plot. Nothing here measures.

A ratio is taken within a round, where the engines ran one after the other in the same minute, and a figure is
the median of its rounds. `of the best` compares each round with whichever peer was best in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from peers.workloads import START, VLLM, WORKLOADS, Goal, Workload

START_TITLE = "from command to first token, not the first start"
START_GOAL_S = 1.0
MAY_START_SOONER = ("llama-cpp-python",)


class Facts(NamedTuple):
    """Of the GGUF file: what a step must read and what a token must multiply."""

    weight_bytes: int
    layer_macs: int  # multiply-adds of a token in all layers
    head_macs: int


class Ceilings(NamedTuple):
    """Of this machine with all its cores, per second, under the native library's names."""

    byte_products: float  # of 8-bit integers; a product and its sum are two
    float_products: float  # of fp32
    model_reads: float  # bytes, of 96 MB read again and again
    memory_reads: float  # bytes, of more than caches hold


def figures(seconds: Mapping[str, Sequence[float]], num_tokens: int | None) -> dict[str, Any]:
    """`seconds`: per engine and round, ours first. Rates are tokens per second; without tokens, in starts,
    the seconds themselves are what is shown. A ratio above 1 says that ours is faster.
    """
    us, *peers = seconds
    ratios = {peer: _ratios(seconds[us], seconds[peer]) for peer in peers}
    found: dict[str, Any] = {
        "seconds": {engine: [round(s, 4) for s in values] for engine, values in seconds.items()},
        "median_s": {engine: round(statistics.median(values), 4) for engine, values in seconds.items()},
        "ratio_to": {peer: round(statistics.median(values), 3) for peer, values in ratios.items()},
    }
    if num_tokens is not None:
        found["tokens_per_s"] = {
            engine: round(statistics.median(num_tokens / s for s in values), 1)
            for engine, values in seconds.items()
        }
    if peers:
        best = [min(values) for values in zip(*ratios.values(), strict=True)]
        found["ratio_to_best"] = round(statistics.median(best), 3)
        found["ratio_to_best_rounds"] = [round(ratio, 3) for ratio in best]
        found["best_peer"] = min(ratios, key=lambda peer: statistics.median(ratios[peer]))
    return found


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [their_s / our_s for our_s, their_s in zip(ours, theirs, strict=True)]


def highest(first: Ceilings, second: Ceilings | str) -> Ceilings:
    """Of two measurements, the second of which may have failed."""
    return first if isinstance(second, str) else Ceilings(*map(max, first, second))


def of_ceiling(
    workload: Workload, median_s: Mapping[str, float], facts: Facts, ceilings: Ceilings
) -> float | None:
    """The share of what the machine could do: of the time to read all weights once per token, for one stream;
    of the time to multiply, for one prompt. None where no single ceiling rules, and for 16-bit weights.
    """
    if workload.num_requests > 1 or workload.in_16_bit:
        return None
    our_s = next(iter(median_s.values()))
    if workload.reads:
        macs = facts.layer_macs * workload.num_own_tokens + facts.head_macs
        least_s = 2 * macs / ceilings.byte_products
    else:
        least_s = workload.num_output_tokens * facts.weight_bytes / ceilings.model_reads
    return round(least_s / our_s, 3)


# ---- the table ---------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> str:
    """Markdown. Output tokens per second, prompt tokens for a prompt, seconds for the start."""
    titles: Mapping[str, str] = result["titles"]
    peers = [name for name in titles if name not in result["ours"]]
    head = ["workload", "mainspring", *(titles[peer] for peer in peers)]
    head += ["to the best", "to vLLM", "of the ceiling"]
    lines = [_row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for found in result["workloads"].values():
        values = found.get("tokens_per_s", found["median_s"])
        form = "{:,.0f}" if "tokens_per_s" in found else "{:.2f} s"
        us = next(iter(values))
        lines.append(
            _row(
                [
                    found["title"],
                    form.format(values[us]),
                    *(form.format(values[peer]) if peer in values else "" for peer in peers),
                    _shown(found.get("ratio_to_best"), "{:.2f}"),
                    _shown(found["ratio_to"].get(VLLM), "{:.2f}"),
                    _shown(found.get("of_ceiling"), "{:.0%}"),
                ]
            )
        )
    return "\n".join(lines)


def goal_of(name: str) -> Goal:
    return next((workload.goal for workload in WORKLOADS if workload.name == name), Goal(None, None))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def verdicts(result: Mapping[str, Any]) -> str:
    """A line for each goal: what was reached of it."""
    lines = []
    for name, found in result["workloads"].items():
        goal = goal_of(name)
        for what, value, wanted in (
            ("of the best peer", found.get("ratio_to_best"), goal.to_best),
            ("of vLLM", found["ratio_to"].get(VLLM), goal.to_vllm),
            ("of the ceiling", found.get("of_ceiling"), goal.of_ceiling),
        ):
            if value is not None and wanted is not None:
                lines.append(f"{_word(value >= wanted)} {name:<20} {value:.2f} {what}, goal {wanted:g}")
        if name == START:
            lines += _start_verdicts(found["median_s"])
    return "\n".join(lines)


def _start_verdicts(median_s: Mapping[str, float]) -> list[str]:
    our_s, *_ = median_s.values()
    limits = {"a second": START_GOAL_S} | {
        peer: value for peer, value in list(median_s.items())[1:] if peer not in MAY_START_SOONER
    }
    return [
        f"{_word(our_s < limit)} {START:<20} {our_s:.2f} s, goal below {what}, {limit:.2f} s"
        for what, limit in limits.items()
    ]


def _word(reached: bool) -> str:
    return f"{'reached' if reached else 'MISSED':<8}"


def description(result: Mapping[str, Any]) -> str:
    """How the figures came about, for beneath the table."""
    machine, load = result["machine"], result["load_average"]
    lines = [
        f"{result['model']}; {machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB; "
        f"{machine['system']}, Python {machine['python']}.",
        f"Medians of {result['rounds']} rounds in which the engines took turns; load average before "
        f"{load['start']}, after {load['end']}"
        + (", while another process kept one core busy." if result["busy"] else "."),
        "Output tokens per second, prompt tokens where a prompt is named alone; ratios are medians of each "
        "round's ratio.",
    ]
    if ceilings := result["ceilings"]:
        lines.append(
            f"Ceilings: {ceilings['byte_products'] / 1e9:.0f} int8 GOP/s, "
            f"{ceilings['float_products'] / 1e9:.0f} fp32 GFLOP/s, reading 96 MB at "
            f"{ceilings['model_reads'] / 1e9:.1f} GB/s, more at {ceilings['memory_reads'] / 1e9:.1f}."
        )
    else:
        lines.append(f"Ceilings not measured: {result['no_ceilings']}.")
    for name, about in result["engines"].items():
        settings = ", ".join(f"{key}={value}" for key, value in about["settings"].items())
        lines.append(f"{result['titles'][name]} {about['version']}: {settings}")
    lines += [f"{name} took no part: {why}" for name, why in result["failed"].items()]
    return "\n".join(lines)


# ---- the plot ----------------------------------------------------------------------------------------------

BAR, GAP, GROUP_GAP, LEFT, WIDTH, RIGHT, TOP = 14, 3, 14, 330, 480, 60, 48  # pixels
COLOURS = ("#3b6fb6", "#d9822b", "#5b9f5b", "#9063a8")


def plot(result: Mapping[str, Any]) -> str:
    """An SVG: how many times as fast as each peer, a bar per peer and workload; a line at 1."""
    titles: Mapping[str, str] = result["titles"]
    peers = [name for name in titles if name not in result["ours"]]
    colour = dict(zip(peers, COLOURS, strict=False))
    shown = [found for name, found in result["workloads"].items() if name != START and found["ratio_to"]]
    ratios = [ratio for found in shown for ratio in found["ratio_to"].values()]
    scale = WIDTH / max([*ratios, 1.0])
    parts = [_text(LEFT, 18, "mainspring: times as fast as", bold=True)]
    x = LEFT
    for peer in peers:
        parts += [_rect(x, 27, 10, 10, colour[peer]), _text(x + 14, 36, titles[peer])]
        x += 30 + 7 * len(titles[peer])
    y = TOP
    for found in shown:
        bars = found["ratio_to"]
        parts.append(_text(LEFT - 8, y + len(bars) * (BAR + GAP) / 2 + 4, found["title"], end=True))
        for peer, ratio in bars.items():
            parts += [
                _rect(LEFT, y, ratio * scale, BAR, colour[peer]),
                _text(LEFT + ratio * scale + 4, y + 11, f"{ratio:.2f}"),
            ]
            y += BAR + GAP
        y += GROUP_GAP
    one = LEFT + scale
    ends = f'x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 4}" y2="{y}"'
    parts.append(f'<line {ends} stroke="#333" stroke-dasharray="4 3"/>')
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{y + 4}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, *, bold: bool = False, end: bool = False) -> str:
    more = (' font-weight="bold"' if bold else "") + (' text-anchor="end"' if end else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'
