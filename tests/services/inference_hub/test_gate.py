from services.inference_hub.gate import Gate, Hold


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_it_is_open_until_something_holds_it():
    gate = Gate(Clock())
    assert gate.is_open
    gate.hold(Hold.NO_ENGINE)
    assert not gate.is_open
    assert gate.reasons == [Hold.NO_ENGINE]


def test_it_opens_when_the_last_reason_ends():
    opened = []
    gate = Gate(Clock())
    gate.on_open = lambda: opened.append(gate.is_open)
    gate.hold(Hold.WEIGHT_UPDATE)
    gate.hold(Hold.NO_ENGINE)
    gate.release(Hold.WEIGHT_UPDATE)
    assert (gate.is_open, opened) == (False, [])
    gate.release(Hold.NO_ENGINE)
    gate.release(Hold.NO_ENGINE)
    assert opened == [True]


def test_it_says_for_how_long_it_was_closed():
    clock = Clock()
    gate = Gate(clock)
    clock.now += 1  # Open.
    gate.hold(Hold.WEIGHT_UPDATE)
    clock.now += 2
    assert gate.closed_s == 2
    gate.hold(Hold.NO_ENGINE)
    clock.now += 3
    gate.release(Hold.WEIGHT_UPDATE)
    gate.hold(Hold.NO_ENGINE)
    clock.now += 4
    gate.release(Hold.NO_ENGINE)
    clock.now += 5  # Open.
    assert gate.closed_s == 9
    gate.hold(Hold.NO_ENGINE)
    clock.now += 6
    assert gate.closed_s == 15
