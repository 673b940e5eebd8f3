"""The account of pins adds up, whatever happens to them."""

from hypothesis import given
from hypothesis import strategies as st

from kvloop.ledger.pins import Pins, PinState


def test_k12_what_a_decode_node_pins_is_counted_until_it_is_known_to_be_gone() -> None:
    pins = Pins()
    pins.pinned(1, "d0", "life", 64, ends_s=480.0)
    pins.pinned(2, "d0", "life", 32, ends_s=490.0)
    pins.pinned(3, "d1", "life", 16, ends_s=490.0)
    pins.move(1, PinState.CLAIMED)
    pins.move(2, PinState.LEAVING)
    assert pins.tokens("d0") == 96
    assert pins.tokens("d0", PinState.HELD, PinState.CLAIMED) == 64
    pins.gone(1)
    assert pins.tokens("d0") == 32
    pins.expire(489.9)
    assert pins.tokens("d0") == 32
    pins.expire(490.0)
    assert (pins.tokens("d0"), pins.tokens("d1")) == (0, 0)


def test_k09_a_restart_ends_the_pins_of_the_earlier_life_only() -> None:
    pins = Pins()
    pins.pinned(1, "d0", "old", 64, ends_s=480.0)
    pins.pinned(2, "d0", "new_dp0", 32, ends_s=480.0)
    pins.restarted("d0", keep_engine_id="new_dp3")
    assert pins.tokens("d0") == 32
    pins.restarted("d0", keep_engine_id=None)
    assert pins.tokens("d0") == 0


_steps = st.lists(
    st.tuples(
        st.sampled_from(["pinned", "move", "gone", "expire", "restarted"]),
        st.integers(1, 12),
        st.sampled_from(list(PinState)),
    ),
    max_size=80,
)


@given(_steps)
def test_the_sums_are_those_of_the_pins(steps: list[tuple[str, int, PinState]]) -> None:
    pins, model, now_s = Pins(), {}, 0.0
    for number, (step, pin_id, state) in enumerate(steps):
        match step:
            case "pinned":
                new_id = pin_id + 120 * number  # ids are never used twice
                pins.pinned(new_id, f"d{new_id % 2}", "life", 16 * new_id, now_s + pin_id)
                model[new_id] = (f"d{new_id % 2}", PinState.HELD, now_s + pin_id)
            case "move":
                for known in [one for one in model if one % 12 == pin_id % 12]:
                    pins.move(known, state)
                    model[known] = (model[known][0], state, model[known][2])
            case "gone":
                for known in [one for one in model if one % 12 == pin_id % 12]:
                    pins.gone(known)
                    del model[known]
            case "expire":
                now_s += pin_id
                pins.expire(now_s)
                model = {key: pin for key, pin in model.items() if pin[2] > now_s}
            case "restarted":
                pins.restarted("d0", None)
                model = {key: pin for key, pin in model.items() if pin[0] != "d0"}
        for decode in ("d0", "d1"):
            for one in PinState:
                wanted = sum(16 * key for key, pin in model.items() if pin[:2] == (decode, one))
                assert pins.tokens(decode, one) == wanted
