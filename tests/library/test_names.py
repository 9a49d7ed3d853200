"""Model names: the meaning of each form, the round trip of str() and parse, and random texts."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgelm.base.errors import ModelError
from edgelm.library.names import (
    CatalogName,
    HubReference,
    LocalPath,
    Reference,
    StarterName,
    is_quantization,
    parse_name,
)
from tests.counts import Count

TEXTS = Count(test=200, soak=20_000)
QWEN = "Qwen/Qwen3-4B-GGUF"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("starter", StarterName()),
        ("STARTER ", StarterName()),
        ("qwen3", CatalogName("qwen3")),
        ("Qwen3:4B", CatalogName("qwen3", "4b")),
        ("qwen3:4b:q8_0", CatalogName("qwen3", "4b", "Q8_0")),
        ("qwen3:Q8_0", CatalogName("qwen3", None, "Q8_0")),
        ("qwen3:30b-a3b:UD-Q4_K_XL", CatalogName("qwen3", "30b-a3b", "UD-Q4_K_XL")),
        (QWEN, HubReference(QWEN)),
        (f"{QWEN}:q4_k_m", HubReference(QWEN, "Q4_K_M")),
        (f"hf.co/{QWEN}:Q4_K_M", HubReference(QWEN, "Q4_K_M")),
        (f"huggingface.co/{QWEN}", HubReference(QWEN)),
        (f"https://huggingface.co/{QWEN}", HubReference(QWEN)),
        (f"https://huggingface.co/{QWEN}/tree/v2", HubReference(QWEN, revision="v2")),
        (f"https://hf.co/{QWEN}/tree/main", HubReference(QWEN)),
        (f"HTTPS://HuggingFace.co/{QWEN}/blob/main/a%20b.gguf?x=1#y", HubReference(QWEN, file="a b.gguf")),
        (
            f"https://huggingface.co/{QWEN}/resolve/refs%2Fpr%2F1/d/x.gguf",
            HubReference(QWEN, None, "d/x.gguf", "refs/pr/1"),
        ),
        (f"{QWEN}@main", HubReference(QWEN)),
        (f"{QWEN}@refs/pr/12", HubReference(QWEN, revision="refs/pr/12")),
        (f"{QWEN}:Q8_0@abc1234", HubReference(QWEN, "Q8_0", None, "abc1234")),
        (f"{QWEN}:big/x-00001-of-00002.gguf", HubReference(QWEN, file="big/x-00001-of-00002.gguf")),
        (f"{QWEN}:latest", HubReference(QWEN, "LATEST")),
        ("model.gguf", LocalPath("model.gguf")),
        ("models/model.GGUF", LocalPath("models/model.GGUF")),
        ("./qwen3", LocalPath("./qwen3")),
        ("../a b", LocalPath("../a b")),
        ("~/models/x", LocalPath("~/models/x")),
        ("/", LocalPath("/")),
        ("a/b/c", LocalPath("a/b/c")),
        ("models/", LocalPath("models/")),
        ("/x\udcff.gguf", LocalPath("/x\udcff.gguf")),
    ],
)
def test_each_form(text: str, meant: Reference) -> None:
    assert parse_name(text) == meant


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "an empty text"),
        ("qwen3::Q8_0", "FAMILY:SIZE"),
        ("a:b:c:d", "FAMILY:SIZE"),
        ("quen 3", "FAMILY:SIZE"),
        (f"{QWEN}:", "missing after"),
        (f"{QWEN}@", "missing after"),
        (f"{QWEN}@v1:Q8_0", "the order is"),
        (f"{QWEN}:../../etc/x.gguf", "inside the repository"),
        (f"{QWEN}:/etc/x.gguf", "inside the repository"),
        ("https://example.com/a/b", "HF_ENDPOINT"),
        ("https://huggingface.co/datasets/a/b", "OWNER/NAME"),
        ("hf.co/only", "OWNER/NAME"),
        ("a--b/c", "OWNER/NAME"),
        ("x" * 5000, "is not a model name"),
        ("a\0b", "is not a model name"),
        ("\x1b[2J", "?[2J"),
    ],
)
def test_an_invalid_name_is_one_line_that_says_why(text: str, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_name(text)
    assert expected in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


words = st.from_regex(r"[a-z0-9](?:[a-z0-9._-]{0,8}[a-z0-9])?", fullmatch=True)
quantizations = st.sampled_from(["Q4_K_M", "Q8_0", "UD-IQ2_XXS", "BF16", "F16", "MXFP4", "TQ1_0", "Q6_K"])
segments = st.from_regex(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,10}[A-Za-z0-9_])?", fullmatch=True).filter(
    lambda text: "--" not in text and ".." not in text
)
revisions = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_./+-]{0,12}[a-z.]", fullmatch=True).filter(
    lambda text: ".." not in text and "//" not in text and text != "main"
)
printable = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1, max_size=8)
parts = printable.filter(lambda text: text not in (".", ".."))
hub_files = st.builds(
    lambda folders, name: "/".join([*folders, f"{name} %41.gguf"]), st.lists(parts, max_size=2), parts
)
references = st.one_of(
    st.just(StarterName()),
    st.builds(LocalPath, st.text(max_size=20).filter(lambda text: "\0" not in text).map(lambda text: f"./{text}")),
    st.builds(
        CatalogName,
        words.filter(lambda w: w != "starter"),
        st.none() | words.filter(lambda w: not is_quantization(w)),
        st.none() | quantizations,
    ),
    st.builds(
        lambda owner, name, choice, revision: HubReference(f"{owner}/{name}", *choice, revision),
        segments,
        segments.filter(lambda text: not text.lower().endswith((".gguf", ".safetensors"))),
        st.one_of(
            st.just((None, None)), quantizations.map(lambda label: (label, None)), hub_files.map(lambda f: (None, f))
        ),
        st.none() | revisions,
    ),
)


@settings(max_examples=TEXTS)
@given(references)
def test_a_reference_survives_writing_and_parsing(reference: Reference) -> None:
    assert parse_name(str(reference)) == reference


@settings(max_examples=TEXTS)
@given(st.text(max_size=40) | st.text("aQ4_KM:/@.%~-b \\\0", max_size=20) | references.map(str).map(lambda t: t[:-1]))
@example("https://")
@example("http://hf.co/a/b/blob/main/%")
@example("a/b:%ff/x")
@example("a/b:%00.gguf")
@example("hf.co/a/b/tree/main")
def test_any_text_is_a_reference_or_one_line(text: str) -> None:
    reference = error = None
    try:
        reference = parse_name(text)
    except ModelError as caught:
        error = caught
    if reference is not None:
        assert parse_name(str(reference)) == reference
    else:
        assert str(error).isprintable()
