"""`PulledSource`: what it keeps, what it lets go of, and where it can go back to."""

import itertools

import torch

from evenpack.integrations.megatron.source import PulledSource


class Items:
    """Samples 0, 1, 2, ...; `before[n]` is called while sample n is read."""

    def __init__(self, **before):
        self.numbers = itertools.count()
        self.before = {int(name[1:]): call for name, call in before.items()}

    def __iter__(self):
        return self

    def __next__(self):
        number = next(self.numbers)
        self.before.get(number, int)()
        return {"tokens": torch.tensor([number]), "number": number}


def numbers(source, count):
    """Read some items and return their numbers."""
    return [sample["number"] for item in itertools.islice(iter(source), count) for sample in item]


def kept(source):
    return [sample["number"] for item in source._log for sample in item]


def test_what_was_handed_out_is_let_go_of():
    items = Items()
    source = PulledSource(items)
    assert (numbers(source, 5), kept(source)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    source.forget(3)
    assert kept(source) == [3, 4]
    source.load_state_dict({"items": 3})
    assert (numbers(source, 3), next(items.numbers)) == ([3, 4, 5], 6)


def test_forgetting_does_not_wait_for_a_reader_who_then_does_it():
    items = Items(n4=lambda: source.forget(3))  # the reader holds the source at that moment
    source = PulledSource(items)
    assert (numbers(source, 4), kept(source)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert (numbers(source, 1), kept(source)) == ([4], [3, 4])


def test_an_earlier_position_than_what_is_kept_begins_anew():
    """As in another process: what comes from there is kept again, whatever was let go of before."""
    items = Items()
    source = PulledSource(items)
    numbers(source, 4)
    source.forget(4)
    source.load_state_dict({"items": 1})
    assert (numbers(source, 2), kept(source), source.position) == ([4, 5], [4, 5], 3)
