"""all-MiniLM-L6-v2 as its folder: vectors as transformers computes them, by the command and by the endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from tests.real.test_commands import edgelm
from tests.server.harness import serving

TEXTS = (
    "The weather is lovely today.",
    "Das Wetter ist schön, der Kaffee heiß; naïve façade, Ångström!",
    "def area(radius):\n    return 3.14159 * radius ** 2",
    "한국어 텍스트 입니다. 你好, 世界! これはテストです。",
    "हिन्दी पाठ, Tiếng Việt có dấu, привет мир, مرحبا",
    "👩‍👩‍👧 emoji 🚀 and a form\x0cfeed, a soft\u00adhyphen and a zero\u200bwidth space",
    "x" * 120 + " is no word",
    "The river runs from the mountains to the sea, past the old mill and the bridge. " * 20,
    "a",
)


@pytest.fixture(scope="module")
def expected(minilm_folder: Path) -> NDArray[np.float32]:
    """Return the vectors of TEXTS: the mean of the last hidden states, normalized."""
    torch = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder)
    model = transformers.AutoModel.from_pretrained(minilm_folder).eval()
    rows = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=512, padding=False)
        with torch.no_grad():
            rows.append(model(**inputs).last_hidden_state[0].mean(0).numpy())
    vectors = np.stack(rows)
    normalized: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalized


def cosines(ours: list[list[float]], theirs: NDArray[np.float32]) -> list[float]:
    found: list[float] = (np.array(ours) * theirs).sum(1).tolist()
    return found


def test_a_folder_has_the_vectors_of_transformers(
    minilm_folder: Path, expected: NDArray[np.float32], own: dict[str, str]
) -> None:
    printed = edgelm(own, "embed", minilm_folder, *TEXTS)
    lines = [json.loads(line) for line in printed.splitlines()]
    found = cosines([line["embedding"] for line in lines], expected)
    print("cosine to transformers:", " ".join(f"{value:.7f}" for value in found))
    assert min(found) >= 0.99999, found
    (kept,) = Path(own["EDGELM_CACHE_DIR"], "converted").glob("*.gguf")
    written = kept.stat().st_ino
    edgelm(own, "embed", minilm_folder, "again")
    assert kept.stat().st_ino == written, "it was made again"


def test_the_endpoint_has_them_too(
    minilm_folder: Path, expected: NDArray[np.float32], own: dict[str, str], tmp_path: Path
) -> None:
    link = tmp_path / "minilm"
    link.symlink_to(minilm_folder)
    with serving(own, link, log=tmp_path / "log") as front:
        client = openai.OpenAI(base_url=f"{front.address}/v1", api_key="none")
        reply = client.embeddings.create(model="minilm", input=list(TEXTS))
        assert min(cosines([each.embedding for each in reply.data], expected)) >= 0.99999
        (listed,) = [model for model in front.http.get("/v1/models").json()["data"] if model["id"] == "minilm"]
        assert listed["edgelm"]["kind"] == "embedding"
        refused = front.chat("minilm", "Hello")
        assert refused.status_code == 400
        assert "computes embeddings" in refused.text
