"""Writes the pictures of the documents: `python docs/pictures/make.py` writes islands.svg, step.svg
and step-delay.svg beside this file.

Each picture has a background of its own and two sets of colours, so that it can be read on light
and on dark pages.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent

STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de; }
  .box { fill: #f6f8fa; stroke: #8c959f; }
  .compute { fill: #54aeff; } .work { fill: #4ac26b; } .send { fill: #fb8f44; }
  .wait { fill: none; stroke: #cf222e; stroke-dasharray: 4 3; }
  .fast { stroke: #1a7f37; stroke-width: 5; fill: none; } .slow { stroke: #bc4c00; stroke-width: 2; stroke-dasharray: 6 4; fill: none; }
  .line { stroke: #57606a; stroke-width: 1.5; fill: none; } .tip { fill: #57606a; }
  text { font: 14px sans-serif; fill: #1f2328; } .small { font-size: 12px; fill: #57606a; } .strong { font-weight: bold; }
  .on { fill: #1f2328; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #30363d; } .box { fill: #21262d; stroke: #6e7681; }
    text { fill: #e6edf3; } .small { fill: #9da7b3; } .on { fill: #0d1117; } .line { stroke: #9da7b3; } .tip { fill: #9da7b3; }
    .fast { stroke: #3fb950; } .slow { stroke: #f0883e; } .wait { stroke: #ff7b72; }
  }
"""  # noqa: E501


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole svg, `width` x `height` pixels, with a background; `title` is read out by screen
    readers.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">'
    )
    mark = '<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    tip = f'{mark}<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
    page = f'<rect class="page" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>'
    lines = [
        head,
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f"<defs>{tip}</defs>",
        page,
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Words at a point; `anchor` is start, middle or end."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, kind: str, words: str = "", height: float = 30) -> str:
    """A coloured bar with words in it."""
    label = (
        text(x + width / 2, y + height / 2 + 4, words, "small" if kind == "wait" else "on")
        if words
        else ""
    )
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'rx="4"/>{label}'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> str:
    """A straight arrow."""
    return f'<path class="{kind}" d="M{x1:g} {y1:g} L{x2:g} {y2:g}" marker-end="url(#tip)"/>'


def join(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<path class="{kind}" d="M{x1:g} {y1:g} L{x2:g} {y2:g}"/>'


def islands() -> str:
    """Two islands of four GPUs: fast inside, slow between; each GPU talks to the one with the same
    shard.
    """
    parts = []
    for left, name, node in ((30, "Island 0", "node A"), (490, "Island 1", "node B")):
        parts += [
            f'<rect class="box" x="{left}" y="30" width="200" height="270" rx="10"/>',
            text(left + 100, 55, name, "strong"),
        ]
        parts.append(text(left + 100, 73, f"{node}: a whole model", "small"))
        spine = left + 40 if left < 300 else left + 160
        parts.append(join(spine, 100, spine, 268, "fast"))
        for shard in range(4):
            y = 88 + 48 * shard
            near = left + 70 if left < 300 else left + 30
            parts += [
                join(spine, y + 16, near + 50, y + 16, "fast"),
                bar(near, y, 100, "compute", f"GPU {shard}: shard {shard}", 32),
            ]
        parts.append(text(left + 100, 290, "FSDP2 or ZeRO, at every step", "small"))
    parts += [join(200, 104 + 48 * shard, 520, 104 + 48 * shard, "slow") for shard in range(4)]
    parts += [
        text(360, 55, "slow network", "strong"),
        text(360, 73, "small messages of the exchange", "small"),
    ]
    parts += [
        text(
            360,
            330,
            "thick: fast links inside a node. dashed: each rank talks to the rank with the same "
            "shard",
            "small",
        )
    ]
    return picture(720, 350, "Two islands: fast links inside, a slow network between them", parts)


def _rows(parts: list[str], names: tuple[str, ...]) -> None:
    parts += [
        text(104, 72 + 56 * number, name, "strong", "end") for number, name in enumerate(names)
    ]


def _axis(parts: list[str], width: int, y: float) -> None:
    parts += [arrow(116, y, width - 20, y), text(width - 20, y + 18, "time", "small", "end")]


def step() -> str:
    """One step without delay: training stands still while the message is under way."""
    width, parts = (
        760,
        [text(380, 32, "One step, delay 0: training waits for the messages", "strong")],
    )
    _rows(parts, ("Island 0", "link", "Island 1"))
    for y in (52, 164):
        parts += [
            bar(126, y, 190, "compute", "forward, backward"),
            bar(320, y, 70, "work", "encode"),
            bar(394, y, 126, "wait", "wait"),
        ]
        parts += [
            bar(524, y, 104, "work", "decode, apply"),
            bar(632, y, 92, "compute", "next step"),
        ]
    parts += [bar(394, 108, 126, "send", "both messages")]
    parts += [
        arrow(390, 84, 398, 106),
        arrow(390, 164, 398, 140),
        arrow(518, 106, 526, 84),
        arrow(518, 140, 526, 162),
    ]
    _axis(parts, width, 222)
    return picture(width, 250, "One step without delay", parts)


def step_delay() -> str:
    """The same with a delay of one step: the message of step t is applied at step t + 1."""
    width, parts = (
        760,
        [text(380, 32, "Delay 1: the message of step t is applied at step t + 1", "strong")],
    )
    _rows(parts, ("Island 0", "link", "Island 1"))
    for y in (52, 164):
        for number, name in enumerate(("step t", "step t + 1", "step t + 2")):
            x = 126 + 202 * number
            words = f"{name}: compute"
            parts += [
                bar(x, y, 126, "compute", words),
                bar(x + 130, y, 34, "work", "enc"),
                bar(x + 166, y, 34, "work", "app"),
            ]
    for number, name in enumerate(("message of t", "message of t + 1")):
        x = 294 + 202 * number
        parts += [
            bar(x, 108, 150, "send", name),
            arrow(x - 6, 84, x + 2, 106),
            arrow(x - 6, 164, x + 2, 140),
        ]
        parts += [arrow(x + 150, 106, x + 200, 84), arrow(x + 150, 140, x + 200, 162)]
    parts.append(
        text(
            380,
            250,
            "enc: encode and send what this step has. app: apply what the step before sent. Nobody "
            "waits.",
            "small",
        )
    )
    _axis(parts, width, 222)
    return picture(width, 264, "Two steps with a delay of one step", parts)


PICTURES = {"islands.svg": islands, "step.svg": step, "step-delay.svg": step_delay}


if __name__ == "__main__":
    for name, make in PICTURES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
