"""What the commands about models do: choose one of those that are here, or pull one.

Owns one function for each. Knows the screen; nothing of widgets' insides.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from edgelm.errors import EdgeLMError, RequestError
from edgelm.executors.memory import available_memory_bytes
from edgelm.library.catalog import hub_reference
from edgelm.library.units import size_text
from edgelm.tui.lines import clean
from edgelm.tui.picker import Here, PickerScreen

if TYPE_CHECKING:
    from edgelm.client.endpoint import ModelEntry
    from edgelm.tui.pulls import Pull
    from edgelm.tui.screen import ChatScreen


async def choose(screen: ChatScreen, argument: str) -> None:
    """Use a model for this chat; without a name, show what is here and what can be pulled."""
    models = await screen.link.models(again=True)
    if not argument:
        await _pick(screen, models)
        return
    found = [each.id for each in models if argument.lower() in each.id.lower()]
    exact = [each for each in found if each == argument]
    if not found and not _why_not(screen):
        hub_reference(argument)  # a misspelt name is answered with those near it
        raise RequestError(f"{argument} is not on this machine", f"/pull {argument} gets it")
    if len(exact or found) != 1:
        what = "no model" if not found else f"{len(found)} models"
        raise RequestError(f"{what} called {argument}", "/model shows all")
    screen.set_model((exact or found)[0])


async def pull(screen: ChatScreen, argument: str) -> None:
    """Pull a model, or stop pulling."""
    verb, _, rest = argument.partition(" ")
    if verb == "stop":
        _stop(screen, rest.strip())
    elif not argument:
        await _pick(screen, await screen.link.models(again=True))
    else:
        if why_not := _why_not(screen):
            raise RequestError(why_not)
        hub_reference(argument)  # a misspelt name is answered at once
        _start(screen, argument)


async def _pick(screen: ChatScreen, models: list[ModelEntry]) -> None:
    why_not = _why_not(screen)
    if why_not and not models:
        raise RequestError("the endpoint offers no model", why_not)
    picked = await screen.app.push_screen_wait(
        PickerScreen(
            "Model of this chat",
            [Here(*each) for each in {each.id: describe_model(each) for each in models}.items()],
            current=screen.status.status.model,
            note=why_not,
            free_bytes=0 if why_not else await asyncio.to_thread(available_memory_bytes),
            pulls=lambda: screen.pulls.running,
        )
    )
    if picked is None:
        return
    if picked.what == "use":
        screen.set_model(picked.name)
    elif picked.what == "stop":
        _stop(screen, picked.name)
    else:
        _start(screen, picked.name)


def _why_not(screen: ChatScreen) -> str:
    """Return why no model can be pulled, empty where one can."""
    if screen.link.remote is None:
        return ""
    return f"the models are those of {screen.link.remote}: only there more can be pulled"


def _start(screen: ChatScreen, model: str) -> None:
    screen.pulls.start(model, screen.session.chat.id)
    screen.notify(f"pulling {model}; the chat goes on meanwhile", markup=False)


def _stop(screen: ChatScreen, model: str) -> None:
    if not screen.pulls.stop(model):
        raise RequestError(f"{model} is not being pulled" if model else "nothing is being pulled")


async def pull_ended(screen: ChatScreen, pulled: Pull) -> None:
    """Say how a pull ended; a model that is here now answers the chat that wanted it."""
    name = clean(pulled.model)
    if pulled.state == "stopped":
        kept = f" at {size_text(pulled.done)}" if pulled.done else ""
        screen.notify(f"the pull of {name} was stopped{kept}; /pull {name} goes on there", markup=False)
        return
    if pulled.state == "failed":
        screen.complain(EdgeLMError(pulled.error))
        return
    model = find_pulled(await screen.link.models(again=True), pulled)
    if model is None:
        screen.notify(f"{name} is here, but the endpoint does not list it yet; /model shows its list", markup=False)
    elif screen.session.chat.id == pulled.chat_id:
        screen.set_model(model)
        screen.notify(f"{model} is here, and answers this chat from now on", markup=False)
    else:
        screen.notify(f"{model} is here: Ctrl+O chooses it", markup=False)


def find_pulled(models: list[ModelEntry], pulled: Pull) -> str | None:
    """Return what the endpoint calls a model that was pulled."""
    real = os.path.realpath(pulled.path)
    return next((each.id for each in models if each.path and os.path.realpath(each.path) == real), None)


def describe_model(model: ModelEntry) -> str:
    """Return what is known of a model in a few words."""
    size = ""
    if model.bytes:
        size = f"{model.bytes / 1e9:.1f} GB" if model.bytes >= 1e9 else f"{model.bytes / 1e6:.0f} MB"
    context = f"{model.context:,} tokens" if model.context else ""
    loaded = "loaded" if model.loaded else ""
    return " · ".join(each for each in (model.architecture, model.quantization, size, context, loaded) if each)
