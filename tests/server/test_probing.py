"""The tokens of an answer and their alternatives, from a real server: a greedy answer is its own likeliest path."""

from __future__ import annotations

import math

import pytest

from edgelm.client.answer_stream import Delta
from edgelm.client.endpoint import ChatRequest, Client
from edgelm.client.probing import alternatives, pieces
from edgelm.client.turns import Turn
from tests.server.harness import Front

REQUEST = ChatRequest("starter", (Turn("user", "What is edgelm?"),), {"temperature": 0, "max_tokens": 40})


async def text_of(client: Client, request: ChatRequest) -> str:
    return "".join([item.text async for item in client.chat(request) if isinstance(item, Delta)])


@pytest.fixture
async def client(front: Front) -> Client:
    made = Client(front.address)
    await made.connect()
    return made


async def test_a_greedy_answer_takes_the_likeliest_token_everywhere(client: Client) -> None:
    text = await text_of(client, REQUEST)
    tokens = await pieces(client, "starter", text)
    assert "".join(tokens) == text
    assert len(tokens) > 5
    for place in range(8):
        found = await alternatives(client, REQUEST, Turn("assistant", "".join(tokens[:place])))
        assert found[0].text == tokens[place], place
        assert len(found) == 10
        shares = [math.exp(item.logprob) for item in found]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1 + 1e-6
    await client.close()


async def test_an_answer_goes_on_from_its_beginning(client: Client) -> None:
    text = await text_of(client, REQUEST)
    tokens = await pieces(client, "starter", text)
    begun = "".join(tokens[:4])
    request = ChatRequest("starter", REQUEST.turns, REQUEST.options, begun=Turn("assistant", begun))
    assert begun + await text_of(client, request) == text
    await client.close()


@pytest.mark.parametrize("text", ["日本語 and é", "a\tb\n\n c", "  two spaces", "🙂🙂"])
async def test_tokens_are_whole_characters(client: Client, text: str) -> None:
    tokens = await pieces(client, "starter", text)
    assert "".join(tokens) == text
    assert all(tokens)
    assert not any("\ufffd" in token for token in tokens)
    await client.close()
