"""Custom logit processors of the tests. The servers import this module when they unpickle one."""

from __future__ import annotations

import json

import dill


class Ban:
    """Makes the tokens of ``custom_params["banned"]`` impossible."""

    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            logits[row, params["banned"]] = -float("inf")
        return logits


class Spoil:
    """Makes the logits of the tokens of ``custom_params["banned"]`` NaN."""

    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            logits[row, params["banned"]] = float("nan")
        return logits


class Favour:
    """Favours tokens that depend on the length of the output and on its last token: it must see the output as it is at
    each position, also inside a run."""

    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            output_ids = params["__req__"].output_ids
            last = output_ids[-1] if output_ids else 0
            favoured = [(7 * len(output_ids) + 3 * last + i) % 256 for i in range(0, 256, 3)]
            logits[row, favoured] += 3.0
        return logits


class Spell:
    """Makes the output begin with ``custom_params["spelling"]``."""

    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            position = len(params["__req__"].output_ids)
            if position < len(params["spelling"]):
                logits[row, params["spelling"][position]] += 1000.0
        return logits


def serialized(processor: type) -> str:
    """A processor as requests carry it."""
    return json.dumps({"callable": dill.dumps(processor).hex()})
