"""Lay out a self-contained HTML page: document, figures, tables and style, shared by all pages of a report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from medusa_train.evaluation.html_report.charts import PALETTE

#: Content Security Policy: answers of a model are not trusted, so the page loads and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

SPEEDUP_CAPTION = (
    "Total tokens per second over those of plain decoding (the same loop without a tree). "
    "Whiskers: 95 % bootstrap intervals over questions."
)
CTAR_CAPTION = "Share of decoding steps that accepted at least w draft tokens."


def document(title: str, sections: Sequence[str]) -> str:
    """Render a whole page; empty sections are left out."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(section for section in sections if section)
        + "</main></body></html>\n"
    )


def figure(title: str, drawing: str, caption: str, *, wide: bool = False) -> str:
    """Render a card with a title, an SVG drawing and a caption."""
    cls = " class=wide" if wide else ""
    return f"<figure{cls}><h3>{escape(title)}</h3>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def cards(figures: Sequence[str]) -> str:
    """Arrange figures in a grid; empty without figures."""
    return f"<div class=cards>{''.join(figures)}</div>" if figures else ""


def figures_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, overall: bool = True) -> str:
    """Render a table; with `overall` its last row is set in bold."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        f"<tr{' class=all' if overall and number == len(rows) - 1 else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def percent(share: float) -> str:
    """Format a share of 1 as an axis label."""
    return f"{100 * share:g} %"


_CSS = """
:root{--paper:#fff;--card:#f7f8fa;--ink:#1a1d23;--soft:#5b6270;--rule:#d9dde4;--accent:#2f5fd0;
--c0:#2f6fd6;--c1:#d9822b;--c2:#2e9e6b;--c3:#b8447f;--c4:#7a57c8;--c5:#1f9fb5;--c6:#a58a1c;--c7:#c2503f;
--t0:#cfe0fb;--t1:#fbdfc0;--t2:#c9eeda;--t3:#f6d3e5;--t4:#e2d8fa;--t5:#c8ecf2;--t6:#efe6b5;--t7:#f7d3cc}
@media (prefers-color-scheme:dark){:root{--paper:#14161a;--card:#1d2026;--ink:#e6e8ec;--soft:#9aa3b2;--rule:#343943;
--accent:#7fa5ff;--c0:#6ea0f5;--c1:#eda55c;--c2:#56c391;--c3:#e07fae;--c4:#a68bee;--c5:#55c5d8;--c6:#d1b94d;
--c7:#e98877;--t0:#24406f;--t1:#66421a;--t2:#1b5238;--t3:#642845;--t4:#45327a;--t5:#145562;--t6:#574a10;--t7:#67281e}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:25px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 10px}h3{font-size:14px;margin:0 0 8px}
p{margin:6px 0}.soft,figcaption{color:var(--soft)}figcaption{font-size:13px;margin-top:8px}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:20px 0 8px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 16px;min-width:150px}
.tile b{display:block;font-size:25px;line-height:1.3}.tile span{font-size:13px;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(330px,1fr));gap:16px}
.cards.two{grid-template-columns:repeat(auto-fit,minmax(460px,1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px}
figure.wide{grid-column:1/-1}svg{width:100%;height:auto;display:block;margin:0 auto}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .tick,svg .node{fill:var(--soft);font-size:11px}
svg .node{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
svg .value{font-weight:600}svg .grid{stroke:var(--rule)}
svg .reference{stroke:var(--soft);stroke-dasharray:4 3}svg .whisker{stroke:var(--ink);stroke-width:1.3}
svg .edge{fill:none;stroke:var(--soft);opacity:.45}svg .root{fill:var(--ink)}
svg .curve{fill:none;stroke-width:2}svg .ringed{stroke:var(--ink);stroke-width:2}
.scroll{overflow-x:auto;margin-top:18px}table{border-collapse:collapse;font-size:14px;width:100%}
th,td{padding:5px 9px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-weight:600;color:var(--soft);white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tr.all td{font-weight:700}
table.meta td{text-align:left;white-space:normal;vertical-align:top;overflow-wrap:anywhere}
table.meta td:first-child{color:var(--soft);white-space:nowrap}
details{border:1px solid var(--rule);border-radius:8px;margin:8px 0;background:var(--card)}
details details{margin:8px 12px;background:var(--paper)}
summary{cursor:pointer;padding:8px 14px}summary span{color:var(--soft);margin-left:8px;font-size:13px}
.question{padding:0 14px;color:var(--soft);white-space:pre-wrap}
.answer{padding:4px 14px 14px;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75}
.answer i,.chip{font-style:normal;border-radius:3px}.chip{padding:1px 7px;margin-right:6px;font-size:13px}
.chip.backbone{border:1px solid var(--rule)}
"""

_SERIES = "".join(
    f"svg .s{n}{{fill:var(--c{n})}}svg .curve.s{n}{{fill:none;stroke:var(--c{n})}}.h{n + 1}{{background:var(--t{n})}}"
    for n in range(PALETTE)
)

STYLE = _CSS + _SERIES
