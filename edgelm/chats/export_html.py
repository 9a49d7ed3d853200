"""A chat as one page of HTML that needs nothing else: no script, no font, no picture from elsewhere.

Owns the look of the page. Everything that a model or a user wrote is escaped, or rendered as Markdown without HTML.
Knows nothing of files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from edgelm.chats.attachments import Attachment
from edgelm.chats.export_md import author_of, end_of, words_of
from edgelm.chats.formulas import keep_formulas
from edgelm.chats.history import Chat, Message, Tree
from edgelm.chats.reading import Reading
from edgelm.chats.tool_calls import ToolCall, segments

MAX_LEXED_CHARS = 200_000  # of a block of code; a longer one has no colours
LIGHT, DARK = "default", "monokai"  # styles of pygments

STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #656d76; --page: #fff; --block: #f4f5f7; --line: #d5d9de;
  --you: #0a58a6; --error: #b42318; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e5e8; --muted: #9aa2ab; --page: #16181b; --block: #23262b;
  --line: #3a3f46; --you: #7cb7ff; --error: #ff8f85; } }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 48rem; background: var(--page); color: var(--text);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
header p, .end, summary, footer { color: var(--muted); font-size: .875rem; }
article { border-top: 1px solid var(--line); padding: .75rem 0; }
article > h2 { font-size: .875rem; margin: 0 0 .25rem; color: var(--muted); }
article.user > h2 { color: var(--you); }
.plain { white-space: pre-wrap; }
.failed { color: var(--error); }
pre { background: var(--block); padding: .75rem; overflow-x: auto; border-radius: .375rem; font-size: .875rem;
  line-height: 1.4; }
code { font-family: ui-monospace, monospace; }
:not(pre) > code { background: var(--block); padding: .1em .3em; border-radius: .25rem; font-size: .9em; }
details { margin: .5rem 0; } details > div { border-left: 2px solid var(--line); padding-left: .75rem; }
summary { cursor: pointer; }
blockquote { margin: .5rem 0; padding-left: .75rem; border-left: 2px solid var(--line); color: var(--muted); }
table { border-collapse: collapse; display: block; overflow-x: auto; } th, td { border: 1px solid var(--line);
  padding: .25rem .5rem; text-align: left; }
img { max-width: 100%; border-radius: .375rem; }
a { color: var(--you); }
"""


def to_html(chat: Chat, tree: Tree) -> str:
    """Return the branch on screen as a page of HTML."""
    title = escape(" ".join(chat.title.split()))
    path = tree.path()
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.changed))
    system = _fold("system prompt", _plain(chat.system)) if chat.system else ""
    articles = "\n".join(_article(message) for message in path)
    # The policy forbids scripts and all loading, should any of it slip through: a page must not report its readers.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{STYLE}{_code_style()}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{date}, {len(path):,} message{"" if len(path) == 1 else "s"}</p>
{system}</header>
<main>
{articles}
</main>
</body>
</html>
"""


def _article(message: Message) -> str:
    parts = [f'<article class="{message.role}">', f"<h2>{escape(author_of(message))}</h2>"]
    parts += [_attachment(attachment) for attachment in message.attachments]
    if message.reasoning.strip():
        parts.append(_fold("reasoning", _plain(message.reasoning)))
    for text, calls in segments(message.text, message.calls):
        if text.strip():
            parts.append(_plain(text) if message.role == "user" else _markdown().render(text))
        parts += [_call(call) for call in calls]
    if message.reading:
        parts.append(_reading(message.reading))
    if end := end_of(message):
        parts.append(f'<p class="end{" failed" if message.state == "failed" else ""}">{escape(end)}</p>')
    return "\n".join([*filter(None, parts), "</article>"])


def _attachment(attachment: Attachment) -> str:
    words = escape(words_of(attachment))
    if attachment.kind == "image" and attachment.media_type.startswith("image/"):
        return f'<p><img src="{escape(attachment.url)}" alt="{escape(attachment.name)}"></p>'
    return _fold(f"attached: {words}", f"<pre>{escape(attachment.text)}</pre>", escaped=True)


def _call(call: ToolCall) -> str:
    name = f"{call.server} › {call.tool}" if call.server else call.tool
    body = f"<pre>{escape(call.arguments)}</pre>" + (f"<pre>{escape(call.result)}</pre>" if call.result else "")
    return _fold(f"tool {name}, {call.state}", body)


def _reading(reading: Reading) -> str:
    if not reading.passages:
        return ""
    passages = (
        f"<p><strong>{number} {escape(passage.name)}</strong></p>{_plain(passage.text)}"
        for number, passage in enumerate(reading.passages, 1)
    )
    return _fold(f"read: {len(reading.passages)} passages", "".join(passages))


def _fold(words: str, body: str, *, escaped: bool = False) -> str:
    return f"<details><summary>{words if escaped else escape(words)}</summary><div>{body}</div></details>\n"


def _plain(text: str) -> str:
    return f'<div class="plain">{escape(text.strip())}</div>'


@cache
def _markdown() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "highlight": _highlighted}).enable(["table", "strikethrough"])
    keep_formulas(parser)
    parser.add_render_rule("image", _image)
    return parser


def _image(renderer: RendererHTML, tokens: Sequence[Token], place: int, options: Any, _env: Any) -> str:
    """Return a picture that is in the text itself; a link to one that is elsewhere, since showing it would load it."""
    source = str(tokens[place].attrs.get("src", ""))
    alt = escape(renderer.renderInlineAsText(tokens[place].children, options, _env) or "image")
    if source.startswith("data:image/"):
        return f'<img src="{escape(source)}" alt="{alt}">'
    return f'<a href="{escape(source)}">{alt}</a>'


def _highlighted(code: str, language: str, _attributes: str) -> str:
    """Return a block of code with colours; empty: the parser escapes it."""
    if not language or len(code) > MAX_LEXED_CHARS:
        return ""
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return ""
    return f'<pre class="code"><code>{highlight(code, lexer, HtmlFormatter(nowrap=True))}</code></pre>'


@cache
def _code_style() -> str:
    return "\n".join(_style_lines())


def _style_lines() -> Iterator[str]:
    # Only the colours of the words: the page has its own background, and the two styles have different ones.
    yield from _rules(LIGHT)
    yield "@media (prefers-color-scheme: dark) {"
    yield from _rules(DARK)
    yield "}\n"


def _rules(style: str) -> Iterator[str]:
    formatter: Any = HtmlFormatter(style=style)  # pygments' stubs leave this method untyped
    rules = formatter.get_style_defs(".code").splitlines()
    yield from (rule for rule in rules if rule.startswith(".code .") and "background" not in rule)
