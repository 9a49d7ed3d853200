"""Stop tokens: the tokens that end the answers of one request beside those that end all.

A control token adds no text to an answer, so no stop string that names one is found in the text. Owns which tokens a
request's stop strings stand for. Knows nothing of how an answer is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from edgelm.text.tokenizer import Tokenizer


def stop_tokens(
    tokenizer: Tokenizer, strings: Iterable[str], ids: Collection[int], marks: Collection[str]
) -> dict[int, str]:
    """Return the stop tokens of a request, each with the string that is reported where it ends an answer.

    They are its `ids`, and the control tokens that its stop strings are, or begin with: `<|im_start|>user` stands for
    `<|im_start|>`, which belongs in no answer. Only where the model's format needs the control token inside answers, as
    one of `marks`, a longer string does not stand for it. Tokens that end every answer are left out.
    """
    found = {token: tokenizer.text_of(token) for token in ids if 0 <= token < tokenizer.num_tokens}
    for string in strings:
        beginnings = (text for text in tokenizer.special_strings if string.startswith(text))
        control = max(beginnings, key=len, default="")
        if not control or (control != string and control in marks):
            continue
        tokens = tokenizer.encode(control, special=True, bos=False)
        if len(tokens) == 1 and not tokenizer.piece(tokens[0]):
            found[tokens[0]] = string
    return {token: string for token, string in found.items() if token not in tokenizer.stop_ids}
