"""The page's style sheet, light and dark. Knows nothing of its content."""

CSS = """
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
table.facts td{text-align:left;white-space:normal;vertical-align:top;overflow-wrap:anywhere}
table.facts td:first-child{color:var(--soft);white-space:nowrap}
details{border:1px solid var(--rule);border-radius:8px;margin:8px 0;background:var(--card)}
details details{margin:8px 12px;background:var(--paper)}
summary{cursor:pointer;padding:8px 14px}summary span{color:var(--soft);margin-left:8px;font-size:13px}
.asked{padding:0 14px;color:var(--soft);white-space:pre-wrap}
.said{padding:4px 14px 14px;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75}
.said i,.chip{font-style:normal;border-radius:3px}.chip{padding:1px 7px;margin-right:6px;font-size:13px}
.chip.own{border:1px solid var(--rule)}
"""

_SERIES = "".join(
    f"svg .s{n}{{fill:var(--c{n})}}svg .curve.s{n}{{fill:none;stroke:var(--c{n})}}.h{n + 1}{{background:var(--t{n})}}"
    for n in range(8)
)

STYLE = CSS + _SERIES
