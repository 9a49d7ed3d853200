"""Names and values from files and models that are shown on one line: without newlines and control characters."""

from __future__ import annotations

from textual.app import App
from textual.widgets import Input

from edgelm.chats.history import Chat, Hit
from edgelm.chats.presets import Preset, Presets
from edgelm.chats.tool_calls import ToolCall
from edgelm.tui.chat_list import chat_rows, hit_rows
from edgelm.tui.dialogs.params import ParamsScreen
from edgelm.tui.dialogs.presets import PresetScreen, preview
from edgelm.tui.transcript.tool_rows import call_rows, short_arguments

BAD = "a\x1b[31m\nb"


def call(arguments: str, tool: str = "echo") -> ToolCall:
    return ToolCall(id="1", server="small", tool=tool, arguments=arguments, at=0, state="done")


def test_a_call_of_a_tool() -> None:
    assert short_arguments(call(r'{"a\nb": "c\nd", "\u2028": {"e\nf": 1}}')) == r'a\nb: "c\nd", \u2028: {"e\nf": 1}'
    assert short_arguments(call("no\n\x1bJSON")) == r"no \u001bJSON"
    assert "\n" not in short_arguments(call('{"a": ' + "[" * 5000 + "]" * 5000 + "}"))
    assert len(call_rows(call("{}", "a\nb"), live=False, unfolded=False)) == 1


def test_the_list_of_chats() -> None:
    chat = Chat(title=BAD, tags=(BAD, "c"))
    lines = chat_rows([chat], None, unfolded=False)[-1].text.plain
    assert lines == "a\ufffd[31m b\n#a\ufffd[31m b #c"
    assert hit_rows([Hit(chat, None, "")], None)[0].text.plain == lines
    hit = hit_rows([Hit(chat, 1, "x\r\x02y\x03\nz")], None)[0]
    assert hit.text.plain == "a\ufffd[31m b\nx y z\n#a\ufffd[31m b #c"


async def test_presets_and_sampling_values() -> None:
    preset = Preset(BAD, "one\ntwo", "", {"reasoning_effort": BAD})
    assert preview(preset).plain == "reasoning_effort  a\ufffd[31m b\nsystem prompt  one\ntwo\n"
    app = App[None]()
    async with app.run_test(size=(100, 40)) as pilot:
        screen = PresetScreen("Presets", Presets(by_name={BAD: preset}), "")
        app.push_screen(screen)
        await pilot.pause()
        prompts = [str(option.prompt) for option in screen.query_one("OptionList").options]
        assert prompts[0].split() == ["a\ufffd[31m", "b", "reasoning_effort", "a\ufffd[31m", "b"]
        assert "\n" not in prompts[0]
        app.pop_screen()
        params = ParamsScreen({"reasoning_effort": BAD}, {"seed": BAD}, is_edgelm=True)
        app.push_screen(params)
        await pilot.pause()
        assert params.query_one("#reasoning_effort", Input).value == "a\ufffd[31m b"
        assert params.query_one("#seed", Input).placeholder == "a\ufffd[31m b"
