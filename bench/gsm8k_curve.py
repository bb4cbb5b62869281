"""Draws what `bench.gsm8k` measured, as an SVG; standard library only.

python -m bench.gsm8k_curve bench/results/gsm8k.json docs/gsm8k.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, FOOT = 880, 330, 46, 40, 44
PANEL, GAP = 440, 60
GREY, BLUE, ORANGE = "#777777", "#2166ac", "#d6604d"

Points = list[tuple[float, float]]


def main(argv: list[str]) -> int:
    """Draw one file; 0 when it is drawn."""
    found = json.loads(Path(argv[0]).read_text("utf-8"))
    parts = [*_course(found), *_lengths(found)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    )
    Path(argv[1]).write_text("\n".join([head, *parts, "</svg>"]) + "\n", "utf-8")
    return 0


def _course(found: dict[str, Any]) -> list[str]:
    """Accepted length by training step."""
    held: Points = [(0, found["untrained"])]
    held += [(point["step"], point["accepted"]) for point in found["curve"]]
    trained: Points = [(point["step"], point["accepted"]) for point in found["training"]]
    last = held[-1][0]
    top = 1 + int(max(value for _, value in held + trained))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        step, value = point
        down = (HEIGHT - TOP - FOOT) * (1 - value / top)
        return LEFT + PANEL * step / last, TOP + down

    lines = [_text(LEFT, 20, "Accepted tokens a block, by training step", "start")]
    for value in range(top + 1):
        _, y = at((0, value))
        lines.append(_line([(LEFT, y), (LEFT + PANEL, y)], "#e5e5e5"))
        lines.append(_text(LEFT - 8, y + 4, str(value), "end"))
    lines += [
        _text(at((step, 0))[0], HEIGHT - FOOT + 18, f"{step:,}", "middle")
        for step in range(0, int(last) + 1, 1000)
    ]
    zeroed = [at((0, found["zeroed"])), at((last, found["zeroed"]))]
    lines += [
        _line([at(each) for each in trained], "#b8cfe4"),
        _line(zeroed, ORANGE, dashed=True),
        _line([at(each) for each in held], BLUE),
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{BLUE}"/>' for x, y in map(at, held)),
    ]
    x, y = at(held[-1])
    prompts = f"{held[-1][1]:.2f} on {found['prompts']} held-out prompts"
    lines.append(_text(x - 6, y - 10, prompts, "end", BLUE))
    words = f"{found['zeroed']:.2f} with context features zeroed"
    lines.append(_text(x, zeroed[0][1] - 7, words, "end", ORANGE))
    lines.append(_text(x, at((0, top / 2))[1] + 30, "pale: blocks in training", "end", GREY))
    return lines


def _lengths(found: dict[str, Any]) -> list[str]:
    """Share of blocks by accepted length."""
    shares = {}
    for name in ("histogram", "histogram_zeroed"):
        total = sum(found[name].values())
        shares[name] = {int(length): count / total for length, count in found[name].items()}
    left, size = LEFT + PANEL + GAP, found["block_size"]
    wide = (WIDTH - left - 10) / size
    low = HEIGHT - FOOT
    tall = (low - TOP) / 0.8
    lines = [_text(left, 20, "Share of blocks, by accepted length", "start")]
    for share in (0, 0.2, 0.4, 0.6, 0.8):
        y = low - tall * share
        lines.append(_line([(left, y), (WIDTH - 10, y)], "#e5e5e5"))
        lines.append(_text(left - 8, y + 4, f"{share:.0%}", "end"))
    for at, (name, colour) in enumerate((("histogram", BLUE), ("histogram_zeroed", ORANGE))):
        for length, share in shares[name].items():
            x, high = left + wide * (length - 1) + wide * (0.1 + 0.4 * at), tall * share
            lines.append(
                f'<rect x="{x:.1f}" y="{low - high:.1f}" width="{wide * 0.4:.1f}"'
                f' height="{high:.1f}" fill="{colour}"/>'
            )
    return [
        *lines,
        *(
            _text(left + wide * (length - 0.5), low + 18, str(length), "middle")
            for length in range(1, size + 1)
        ),
        _text(WIDTH - 10, TOP + 24, "trained drafter", "end", BLUE),
        _text(WIDTH - 10, TOP + 42, "context features zeroed", "end", ORANGE),
    ]


def _line(points: Points, colour: str, *, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
