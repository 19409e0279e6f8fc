"""HTML of the report: style sheet, and the few elements it is made of.

The page is self-contained: no script, no font, no link. Light or dark follows the reader's system;
on paper it is light. Text is escaped here.
"""

import math
from collections.abc import Sequence
from html import escape

MISSING = "\N{EN DASH}"

_LIGHT = """--bg:#f6f7f9;--panel:#fff;--ink:#17202b;--soft:#5d6877;--line:#dfe4ea;--accent:#1f6f8b;
--track:#e3e9ee;--s0:#2f6fd0;--s1:#d9692a;--s2:#22906a;--s3:#c23a77;--s4:#7d55c7;--s5:#a47c00;
--s6:#0f8a9d;--s7:#69737f;"""
_DARK = """--bg:#10151b;--panel:#182029;--ink:#e6ebf0;--soft:#98a5b3;--line:#2b3641;
--accent:#5fb6d3;--track:#2a3540;--s0:#76a7f7;--s1:#f39a63;--s2:#57c99b;--s3:#ef7fb1;--s4:#b597f2;--s5:#dcb842;
--s6:#4fc3d6;--s7:#a5afba;"""

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums}}
main{{max-width:1060px;margin:0 auto;padding:36px 24px 56px}}
header p,.note{{color:var(--soft);margin:4px 0 0;overflow-wrap:anywhere}}
.note{{font-size:13px;margin:8px 0 0;max-width:80ch}}
h1{{font-size:27px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}}
h2{{font-size:17px;margin:0 0 12px}}
h2 + .note{{margin:-8px 0 12px}}
.kicker{{color:var(--accent);font-weight:600;font-size:12px;letter-spacing:.09em;
text-transform:uppercase;margin:0 0 6px}}
.cards{{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;
margin:24px 0 12px}}
.card,section{{background:var(--panel);border:1px solid var(--line);border-radius:10px}}
.card{{padding:14px 16px}}
.card b{{display:block;font-size:25px;line-height:1.25;letter-spacing:-.02em;white-space:nowrap}}
.card b small{{font-size:14px;font-weight:500;color:var(--soft);letter-spacing:0}}
.card span{{color:var(--soft);font-size:13px}}
.card .what{{font-size:13px;font-weight:600}}
section{{padding:18px 20px;margin-top:14px;overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:14px}}
th{{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px}}
th,td{{padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:middle}}
tr:last-child td{{border-bottom:0}}
td.num,th.num{{text-align:right;white-space:nowrap}}
td.bar,td.name{{white-space:nowrap}}
th.bar,td.bar{{padding-left:14px}}
table.narrow{{width:auto;min-width:min(100%,560px)}}
* + table.narrow{{margin-top:16px}}
td small,dd small{{color:var(--soft)}}
.mono,td code,dd code{{font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
overflow-wrap:anywhere}}
svg{{display:block}}
svg.plot{{width:100%;height:auto}}
svg.bar{{display:inline-block;vertical-align:middle;margin-right:10px}}
.grid{{stroke:var(--line)}}
.tick{{fill:var(--soft);font-size:12px}}
.label{{fill:var(--soft);font-size:12.5px}}
.series polyline{{fill:none;stroke:var(--c);stroke-width:1.6;stroke-opacity:.75}}
.series circle{{fill:var(--c);stroke:var(--panel);stroke-width:1}}
svg.plot:has(.series:hover) .series:not(:hover){{opacity:.18}}
.track{{fill:var(--track)}} .fill{{fill:var(--accent)}}
.one{{stroke:var(--ink);stroke-width:1;stroke-opacity:.55}}
.whisker{{stroke:var(--ink);stroke-width:1.3;fill:none}}
.legend{{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--soft)}}
.key i{{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}}
details{{margin-top:12px}}
summary{{cursor:pointer;color:var(--accent);font-weight:600;font-size:14px}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:5px 20px;margin:0;font-size:14px}}
dt{{color:var(--soft)}} dd{{margin:0;overflow-wrap:anywhere}}
@media (max-width:640px){{main{{padding:20px 12px}}dl{{grid-template-columns:1fr;gap:0 0}}
dd{{margin-bottom:8px}}}}
@media print{{:root{{{_LIGHT}--bg:#fff;color-scheme:light}}
body{{font-size:11.5px;-webkit-print-color-adjust:exact;print-color-adjust:exact}}
main{{max-width:none;padding:0}}section,.card{{break-inside:avoid}}
section:has(details[open]){{break-inside:auto}}
details:not([open]),section:has(h2 + details:not([open])){{display:none}}
.card{{padding:10px}}.card b{{font-size:18px}}.card span,.note{{font-size:10.5px}}
.cards{{grid-template-columns:repeat(5,1fr);gap:8px}}section{{overflow:visible}}
table{{font-size:11px}}th{{font-size:10.5px}}th,td{{padding-right:9px}}
svg.bar{{width:100px;height:10px}}}}
"""


class Markup(str):
    """Text that is HTML already; any other str is escaped."""


def html(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def card(what: str, value: object, unit: str, explanation: str) -> Markup:
    small = f" <small>{html(unit)}</small>" if unit else ""
    return Markup(
        f'<div class="card"><span class="what">{html(what)}</span><b>{html(value)}{small}</b>'
        f"<span>{html(explanation)}</span></div>"
    )


def section(title: str, *body: Markup) -> Markup:
    return Markup(f"<section><h2>{html(title)}</h2>{''.join(body)}</section>\n")


def note(text: str) -> Markup:
    return Markup(f'<p class="note">{html(text)}</p>')


def table(
    head: Sequence[tuple[str, str]],  # (title, class of the column: num, bar, name or nothing)
    rows: Sequence[Sequence[object]],
    narrow: bool = False,  # as wide as its content, for few columns
) -> Markup:
    def line(tag: str, cells: Sequence[object]) -> str:
        return "".join(
            f'<{tag} class="{kind}">{html(cell)}</{tag}>'
            if kind
            else f"<{tag}>{html(cell)}</{tag}>"
            for (_, kind), cell in zip(head, cells, strict=True)
        )

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    titles = line("th", [title for title, _ in head])
    opening = '<table class="narrow">' if narrow else "<table>"
    return Markup(f"{opening}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>")


def details(summary: str, body: Markup) -> Markup:
    return Markup(f"<details><summary>{html(summary)}</summary>{body}</details>")


def facts(pairs: Sequence[tuple[str, object]]) -> Markup:
    """A list of names and values without those that are None or empty."""
    shown = [(name, value) for name, value in pairs if value is not None and value != ""]
    body = "".join(f"<dt>{html(name)}</dt><dd>{html(value)}</dd>" for name, value in shown)
    return Markup(f"<dl>{body}</dl>")


def code(text: object) -> Markup:
    return Markup(f"<code>{html(text)}</code>")


def page(title: str, kicker: str, subtitles: Sequence[object], *body: Markup) -> str:
    under = "".join(f"<p>{html(line)}</p>" for line in subtitles if line)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        f'<header><p class="kicker">{html(kicker)}</p><h1>{html(title)}</h1>{under}</header>\n'
        f"{''.join(body)}</main></body></html>\n"
    )


# -- numbers for people


def number(value: object) -> float | None:
    """None for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def quantity(value: object) -> str:
    """With up to four significant digits."""
    known = number(value)
    if known is None:
        return "not finite"
    if 1 <= abs(known) < 1000:
        return f"{known:.2f}"
    return f"{known:,.0f}" if abs(known) >= 1000 else f"{known:.4g}"


def count(value: object) -> str:
    known = number(value)
    return MISSING if known is None else f"{known:,.0f}"


def size(value: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
