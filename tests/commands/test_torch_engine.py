"""The torch engine as a user sees it: a folder of safetensors with every command, and the same flags."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from edgelm.backends.build import build, choose_for_all
from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.base.workers.messages import EngineJob
from edgelm.commands import plan
from edgelm.engine.core import SamplingParams
from tests.commands.test_run import Edgelm, error_of
from tests.server.harness import serving
from tests.tiny import write_tiny

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "Once upon a time"


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer whose tokens are the bytes; return the size of its vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    rust.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(letters) + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models.tiny_models import build as tiny_model  # takes torch, in each process that collects tests
    from tests.models.tiny_models import write

    path = tmp_path_factory.mktemp("tiny-qwen")
    size = write_tokenizer(path)
    return write(
        tiny_model("qwen3", vocab_size=size, eos_token_id=None, max_position_embeddings=512, tie_word_embeddings=False),
        path,
    )


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[int]:
    """Return the answer of transformers to the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ids = [letters["Ġ" if letter == " " else letter] for letter in PROMPT]
    with torch.no_grad():
        answer = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20, pad_token_id=0)
    return answer[0, len(ids) :].tolist()


def test_a_folder_answers_as_with_transformers(edgelm: Edgelm, folder: Path, greedy: list[int]) -> None:
    arguments = ("--raw", "--temperature", "0", "--max-tokens", "20", "--json", "--kv", "f16", "--engine", "torch")
    done = edgelm("run", folder, PROMPT, *arguments, "--spec", "8")
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["token_ids"] == greedy


async def decode(loaded: LoadedModel, text: str, count: int) -> list[int]:
    prompt = loaded.tokenizer.encode(text, special=False, bos=True)
    stream = loaded.engine.submit(prompt, SamplingParams(temperature=0, max_tokens=count))
    return [sample.id async for event in stream for sample in event.sampled]


def answer(path: Path, **settings: object) -> list[int]:
    """Return the answer of a model that is built in this process, as the worker of the commands builds it."""
    loaded = build(EngineJob(model=path, settings=Settings(**{"ctx": 256, "parallel": 1} | settings)))  # type: ignore[arg-type]
    try:
        return asyncio.run(decode(loaded, PROMPT, 12))
    finally:
        loaded.engine.close()


def test_four_bits_at_load_are_another_model(folder: Path, greedy: list[int]) -> None:
    assert answer(folder) == greedy[:12]  # the default engine
    assert len(answer(folder, quantize="int4")) == 12


def test_the_openai_client(server_environment: dict[str, str], folder: Path, tmp_path: Path) -> None:
    with (
        serving(server_environment, folder, log=tmp_path / "log") as front,
        OpenAI(base_url=f"{front.address}/v1", api_key="none", timeout=60) as client,
    ):
        assert folder.name in [model.id for model in client.models.list()]
        request = {"model": folder.name, "messages": [{"role": "user", "content": PROMPT * 3}], "max_tokens": 12}
        wait = {"prefer": "wait"}
        whole = client.chat.completions.create(**request, temperature=0, extra_headers=wait)
        stream = client.chat.completions.create(**request, temperature=0, stream=True, extra_headers=wait)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == whole.choices[0].message.content
        assert whole.usage
        assert whole.usage.completion_tokens == 12
        again = client.chat.completions.create(**request, temperature=0, extra_headers=wait)
        assert again.usage
        assert again.usage.prompt_tokens_details
        assert again.usage.prompt_tokens_details.cached_tokens  # its blocks are cached
        assert front.ps(folder.name)["engine"] == "torch"


def test_eval_compares_kv_caches(edgelm: Edgelm, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    done = edgelm("eval", folder, text, "--kv", "k6v4", "--against", "f16", "--window", "128", "--limit", "2", "--json")
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    assert result["windows"] == 2
    assert 0 < result["mean_kl"] < 1


def test_plan_and_bench(edgelm: Edgelm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ask_choice", cache(plan.ask_choice))  # of a process that imports torch
    result = json.loads(edgelm("plan", folder, "--json").stdout)
    assert (result["engine"], result["device"]) == ("torch", "cpu")
    assert result["chosen"]["context"] == 512
    assert set(result["kv_bytes_per_token"]) == {"f16", "int8", "fp8", "k8v4", "k6v4"}
    assert result["chosen"]["estimated_tokens_per_second"] is None  # the reference ops are slower than the memory
    assert result["chosen"]["snapshot_bytes"] == 0
    page = edgelm("plan", folder).stdout.decode()
    assert "runs on the processor by the torch engine, slowly" in page
    assert "earlier conversations" not in page
    flags = ("-p", "8", "-n", "4", "-r", "1", "--in-process", "--json")
    measured = json.loads(edgelm("bench", folder, *flags).stdout)
    assert (measured["engine"], measured["device"]) == ("torch", "cpu")
    assert len(measured["results"]) == 2


def test_a_gguf_by_either_engine(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", context=512)
    assert answer(path, engine="torch") == answer(path, engine="llama")


def test_a_folder_drafts_for_a_folder(edgelm: Edgelm, folder: Path, greedy: list[int]) -> None:
    arguments = ("--raw", "--temperature", "0", "--max-tokens", "20", "--json", "--kv", "f16", "--no-memory")
    done = edgelm("run", folder, PROMPT, *arguments, "--draft", folder)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["token_ids"] == greedy
    line = error_of(edgelm("run", folder, PROMPT, *arguments, "--draft", "starter"))
    assert "cannot draft for this model: it has another vocabulary" in line


# -- impossible requests -----------------------------------------------------------------------------------------------


def test_an_error_is_one_line(edgelm: Edgelm, folder: Path) -> None:
    line = error_of(edgelm("run", folder, "x", "--kv", "k8v16"))
    assert "torch engine" in line
    assert "; " in line  # followed by the hint


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine": "llama"}, "does not read safetensors"),
        ({"device": "cuda"}, "--device cuda"),
        ({"device": "gpu"}, "only llama.cpp has --device gpu"),
        ({"ctx": 4096}, "512 tokens"),
    ],
)
def test_an_impossible_setting_is_refused(folder: Path, settings: dict[str, object], reason: str) -> None:
    assert reason in refusal(folder, **settings)


def test_quantizing_is_not_llama_cpps(tmp_path: Path) -> None:
    assert "--quantize" in refusal(write_tiny(tmp_path / "m.gguf", context=512), engine="llama", quantize="int4")


def refusal(path: Path, **settings: object) -> str:
    """Return the error line that a user sees."""
    with pytest.raises(EdgeLMError) as caught:
        build(EngineJob(model=path, settings=Settings(**settings)))  # type: ignore[arg-type]
    assert caught.value.hint
    return str(caught.value)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


GPTQ = {"quant_method": "gptq", "bits": 3, "group_size": 128}


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", '{"model_type": "rwkv9", "hidden_size": 64, "num_hidden_layers": 3}', "rwkv9"),
        ("config.json", "{", "not valid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", b"\xff", "tokenizer.json"),
        ("tokenizer_config.json", "[", "tokenizer_config.json"),
    ],
)
def test_a_damaged_folder_is_one_line(copied: Path, file: str, content: str | bytes | None, reason: str) -> None:
    (copied / file).unlink()
    if content is not None:
        (copied / file).write_bytes(content.encode() if isinstance(content, str) else content)
    assert reason in refusal(copied)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        (GPTQ, "its weights have 3 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "its quantization method is bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "its quantization method is modelopt NVFP4"),
    ],
)
def test_a_quantization_that_cannot_be_read_is_one_line(
    copied: Path, monkeypatch: pytest.MonkeyPatch, quantization: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr("edgelm.backends.torch.build.build_torch", lambda *_: pytest.fail("the header shows it before"))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert reason in refusal(copied)


def test_modelopt_names_its_quantization_in_its_own_file(copied: Path) -> None:
    beside = copied / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}}))
    assert "modelopt NVFP4" in refusal(copied)
    beside.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert len(answer(copied)) == 12, "the weights are as they were"


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        ("float8_e4m3fn", "does not say how its weights are quantized"),
        ("float64", "is F64, which cannot be multiplied; take a GGUF of the same model"),
        ("int16", "is I16, which cannot be multiplied; take a GGUF of the same model"),
    ],
)
def test_weights_of_a_type_that_is_not_read(copied: Path, dtype: str, reason: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors, kind = load_file(copied / "model.safetensors"), getattr(torch, dtype)
    save_file({name: tensor.to(kind) for name, tensor in tensors.items()}, copied / "model.safetensors")
    assert reason in refusal(copied)


def test_another_tokenizer_is_named(copied: Path) -> None:
    (copied / "tokenizer.json").rename(copied / "tokenizer.model")
    assert "has tokenizer.model and no tokenizer.json; take a GGUF" in refusal(copied)


def test_a_cut_weight_file_is_one_line(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refusal(copied)


HIDE = """
import importlib.util, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {packages} else find(name, package)
sys.meta_path.insert(0, Hidden())
"""


def hide(folder: Path, *packages: str) -> str:
    """Return a PYTHONPATH that hides packages."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(packages=packages))
    return str(folder)


def test_without_tokenizers(edgelm: Edgelm, folder: Path, tmp_path: Path) -> None:
    """As after `pip install torch` alone: llama.cpp reads the tokenizer of a GGUF."""
    hidden = hide(tmp_path / "hidden", "tokenizers", "tokenizers.models")
    line = error_of(edgelm.process("run", folder, "x", PYTHONPATH=hidden))
    assert "needs the package tokenizers, which is not installed; type: " in line
    assert "install" in line
    path = write_tiny(tmp_path / "m.gguf", context=512)
    flags = ("--raw", "--max-tokens", "3", "--json", "--engine", "torch", "--spec", "off")
    done = edgelm.process("run", path, "x", *flags, PYTHONPATH=hidden)
    assert done.returncode == 0, done.stderr.decode()


def test_without_torch(edgelm: Edgelm, folder: Path, tmp_path: Path) -> None:
    """A GGUF runs, and a folder names the missing package, in every process of a command."""
    hidden = hide(tmp_path / "hidden", "torch", "triton")
    line = error_of(edgelm.process("run", folder, "x", PYTHONPATH=hidden))
    assert "needs torch" in line
    assert "edgelm[cuda]" in line
    path = write_tiny(tmp_path / "m.gguf", context=512)
    done = edgelm.process("run", path, "x", "--raw", "--max-tokens", "3", "--json", PYTHONPATH=hidden)
    assert done.returncode == 0, done.stderr.decode()
    assert "needs torch" in error_of(edgelm.process("run", path, "x", "--engine", "torch", PYTHONPATH=hidden))


def test_both_sides_of_an_evaluation_run_on_one_engine(folder: Path, tmp_path: Path) -> None:
    gguf = write_tiny(tmp_path / "m.gguf", context=512)
    for paths in ([gguf, folder], [folder, gguf]):
        choice = choose_for_all(paths, Settings(device="cpu"))
        assert (choice.engine, choice.device) == ("torch", "cpu")
    assert choose_for_all([gguf], Settings(device="cpu")).engine == "llama"
    with pytest.raises(EdgeLMError, match="does not read safetensors"):
        choose_for_all([gguf, folder], Settings(engine="llama"))
