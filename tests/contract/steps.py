"""The steps. Each is a few requests straight to the engines, and what is to be looked at.

Nothing is expected here: what real vLLM was seen to do is in the recording beside this file.
Blocks are of 32 tokens, so a prompt of 106 and OUTPUT generated, the last without KV, are 4.
"""

from __future__ import annotations

import json
from typing import Any

from tests.contract.script import (
    CHAT,
    COLD,
    COMPLETIONS,
    OUTPUT,
    Context,
    Params,
    Step,
    reference_summary,
    trimmed,
    types,
)
from tests.contract.target import LEASE_S, TTL_S

# --- the two legs and the way back ------------------------------------------------------------


async def cold_prefill(c: Context) -> None:
    leg = await c.prefill(c.fresh(106))
    c.note(P=leg.summary(), params=types(leg.params))
    await c.look()


async def decode_after_prefill(c: Context) -> None:
    prompt = c.fresh(106)
    prefilled = await c.prefill(prompt)
    leg = await c.decode(prompt, prefilled.params)
    c.note(
        D=leg.summary(), body=types(leg.body), right=leg.output == (await c.truth(prompt)).output
    )
    await c.look()


async def next_turn_pulls_and_decodes(c: Context) -> None:
    turn = await c.turn()
    await c.look("first turn")
    prompt = [*turn.history, *c.fresh(24)]
    prefilled = await c.prefill(prompt, trimmed(turn.reference, 96))
    await c.look("P leg")
    leg = await c.decode(prompt, prefilled.params)
    c.note(
        P=prefilled.summary(), D=leg.summary(), right=leg.output == (await c.truth(prompt)).output
    )
    await c.look("D leg")


async def pull_of_the_whole_reference(c: Context) -> None:
    turn = await c.turn()
    c.note(P=await c.pulled([*turn.history, *c.fresh(24)], turn.reference))
    await c.look()


async def pull_of_a_whole_prompt(c: Context) -> None:
    """Every token of the prompt is read; the last is computed all the same."""
    turn = await c.turn()
    c.note(P=await c.pulled(turn.prompt[:96], trimmed(turn.reference, 96)))
    await c.look()


async def second_use(c: Context) -> None:
    turn = await c.turn()
    prompt = [*turn.history, *c.fresh(24)]
    reference = trimmed(turn.reference, 96)
    c.note(first=await c.pulled(prompt, reference))
    await c.look("first use")
    c.note(second=await c.pulled(prompt, reference))
    await c.look("second use")


# --- references that do not fit the prompt ----------------------------------------------------


async def shorter_prompt_untrimmed(c: Context) -> None:
    turn = await c.turn()
    c.note(P=await c.pulled(turn.prompt[:70], turn.reference))
    await c.look()


async def shorter_prompt_trimmed(c: Context) -> None:
    turn = await c.turn()
    c.note(P=await c.pulled(turn.prompt[:70], trimmed(turn.reference, 64)))
    await c.look()


async def edited_history_untrimmed(c: Context) -> None:
    turn = await c.turn()
    edited = [*turn.prompt[:64], *c.fresh(32), *turn.history[96:], *c.fresh(24)]
    c.note(P=await c.pulled(edited, turn.reference))
    await c.look()


async def edited_history_trimmed(c: Context) -> None:
    turn = await c.turn()
    edited = [*turn.prompt[:64], *c.fresh(32), *turn.history[96:], *c.fresh(24)]
    c.note(P=await c.pulled(edited, trimmed(turn.reference, 64)))
    await c.look()


async def another_conversation(c: Context) -> None:
    turn = await c.turn()
    c.note(P=await c.pulled(c.fresh(136), trimmed(turn.reference, 96)))
    await c.look()


async def below_threshold(c: Context) -> None:
    turn = await c.turn()
    c.note(P=await c.pulled([*turn.prompt[:32], *c.fresh(70)], trimmed(turn.reference, 32)))
    await c.look()


# --- a prefill node with a prefix cache: D in that role, P holds what it pulls ----------------


async def covered_by_the_local_cache(c: Context) -> None:
    turn = await c.held()
    warm = await c.prefill(turn.prompt, engine="D")
    c.note(warm=warm.summary())
    await c.look("warm")
    prompt = [*turn.prompt, *c.fresh(24)]
    c.note(D=await c.pulled(prompt, trimmed(turn.reference, 96), engine="D"))
    await c.look("pull")


async def partly_in_the_local_cache(c: Context) -> None:
    turn = await c.held()
    await c.prefill([*turn.prompt[:32], *c.fresh(8)], engine="D")
    prompt = [*turn.history, *c.fresh(24)]
    c.note(D=await c.pulled(prompt, trimmed(turn.reference, 96), engine="D"))
    await c.look()


async def partly_cached_and_the_rest_below_threshold(c: Context) -> None:
    turn = await c.held()
    await c.prefill([*turn.prompt[:64], *c.fresh(8)], engine="D")
    prompt = [*turn.history, *c.fresh(24)]
    c.note(D=await c.pulled(prompt, trimmed(turn.reference, 96), engine="D"))
    await c.look()


async def a_wrong_pull_poisons_the_cache(c: Context) -> None:
    """The next one who asks for these tokens has no reference and is answered wrongly."""
    turn = await c.held()
    prompt = c.fresh(136)
    c.note(wrong=await c.pulled(prompt, trimmed(turn.reference, 96), engine="D"))
    leg = await c.ask("D", prompt=prompt, max_tokens=OUTPUT, ignore_eos=True)
    c.note(victim=leg.summary(), right=leg.output == (await c.truth(prompt)).output)
    await c.look()


async def another_salt_shares_no_cache(c: Context) -> None:
    prompt, asked = c.fresh(106), {"engine": "D", "max_tokens": 1}
    for name, salt in (("first", "a"), ("other", "b"), ("again", "a")):
        leg = await c.prefill(prompt, **asked, cache_salt=salt)
        c.note(**{name: leg.summary()})
    await c.look()


async def decode_finds_its_own_cache(c: Context) -> None:
    """D reads only what it lacks, and reports what P had."""
    turn = await c.turn()
    prefilled = await c.prefill(turn.prompt)
    await c.look("P leg")
    leg = await c.decode(turn.prompt, prefilled.params)
    c.note(D=leg.summary(), same=leg.output == turn.output)
    await c.look("D leg")


async def prefill_read_twice(c: Context) -> None:
    prompt = c.fresh(106)
    prefilled = await c.prefill(prompt)
    first = await c.decode(prompt, prefilled.params)
    await c.look("first")
    second = await c.decode(prompt, prefilled.params)
    c.note(D=second.summary(), same=first.output == second.output)
    await c.look("second")


# --- refusals, releases, deadlines ------------------------------------------------------------


async def expired_reference_is_refused(c: Context) -> None:
    turn = await c.turn()
    prompt, reference = [*turn.history, *c.fresh(24)], trimmed(turn.reference, 96)
    c.note(P=await c.pulled(prompt, {**reference, "remote_blocks_expiry_time": 1.0}))
    await c.look("refused")
    c.note(retry=await c.pulled(prompt, reference))
    await c.look("retry")


async def reference_without_an_expiry(c: Context) -> None:
    turn = await c.turn()
    reference = trimmed(turn.reference, 96)
    del reference["remote_blocks_expiry_time"]
    c.note(P=await c.pulled([*turn.history, *c.fresh(24)], reference))
    await c.look()


async def unknown_engine_id(c: Context) -> None:
    turn = await c.turn()
    wrong = {**trimmed(turn.reference, 96), "remote_engine_id": "0" * 32}
    c.note(P=await c.pulled([*turn.history, *c.fresh(24)], wrong))
    await c.look()


async def known_engine_at_another_port(c: Context) -> None:
    turn = await c.turn()
    wrong = {**trimmed(turn.reference, 96), "remote_port": 9}
    c.note(P=await c.pulled([*turn.history, *c.fresh(24)], wrong))
    await c.look()


async def unknown_request_id(c: Context) -> None:
    turn = await c.turn()
    wrong = {**trimmed(turn.reference, 96), "remote_request_id": "nobody"}
    c.note(P=await c.pulled([*turn.history, *c.fresh(24)], wrong))
    await c.look()


async def decode_cannot_load(c: Context) -> None:
    prompt = c.fresh(106)
    prefilled = await c.prefill(prompt)
    wrong = {**prefilled.params, "remote_engine_id": "0" * 32}
    c.note(D=(await c.decode(prompt, wrong)).summary())
    asked = {"model": c.target.model, "prompt": prompt, "max_tokens": OUTPUT}
    await c.look("once")
    status, events = await c.target.stream("D", COMPLETIONS, {**asked, "kv_transfer_params": wrong})
    c.note(streamed=[status, kinds(events)])
    await c.look()


async def release_of_a_decode_pin(c: Context) -> None:
    turn = await c.turn()
    await c.look("pinned")
    c.note(P=(await c.release(turn.reference, by="P")).summary())
    await c.look("released")
    c.note(again=(await c.release(turn.reference, by="P")).summary())
    await c.look("released again")


async def release_of_a_prefill_lease(c: Context) -> None:
    prefilled = await c.prefill(c.fresh(106))
    await c.look("held")
    c.note(D=(await c.release(prefilled.params, by="D")).summary())
    await c.look("released")


async def release_at_an_unknown_engine(c: Context) -> None:
    turn = await c.turn()
    wrong = {**turn.reference, "remote_engine_id": "0" * 32}
    c.note(P=(await c.release(wrong, by="P")).summary())
    await c.look()


async def lease_and_ttl_end_by_themselves(c: Context) -> None:
    """P's lease first, D's TTL later; who reads after that without an expiry is not refused."""
    turn = await c.turn()
    await c.prefill(c.fresh(106))
    await c.look("held")
    await c.target.pass_time(LEASE_S + 1)
    await c.look("lease over")
    await c.target.pass_time(TTL_S - LEASE_S)
    await c.look("TTL over")
    prompt, reference = [*turn.history, *c.fresh(24)], trimmed(turn.reference, 96)
    c.note(with_expiry=await c.pulled(prompt, reference))
    await c.look("refused")
    del reference["remote_blocks_expiry_time"]
    c.note(without_expiry=await c.pulled(prompt, reference))
    await c.look("late")


# --- how requests end -------------------------------------------------------------------------


async def one_token(c: Context) -> None:
    prompt = c.fresh(106)
    prefilled = await c.prefill(prompt)
    c.note(D=(await c.decode(prompt, prefilled.params, max_tokens=1)).summary())
    await c.look()


async def stop_token(c: Context) -> None:
    turn = await c.turn()
    stop = turn.output[1]
    prefilled = await c.prefill(turn.prompt)
    leg = await c.decode(turn.prompt, prefilled.params, stop_token_ids=[stop])
    c.note(finish=leg.body["choices"][0]["finish_reason"], ends_with_it=leg.output[-1] == stop)
    kept = leg.params["remote_num_tokens"] - len(turn.prompt) - len(leg.output)
    c.note(kept_of_the_output=kept)
    await c.look()


async def stop_string(c: Context) -> None:
    """Ends on the API side, as an abort: nothing is kept."""
    turn = await c.turn()
    said = await c.ask("P", prompt=turn.prompt, max_tokens=OUTPUT, ignore_eos=True)
    stop = said.body["choices"][0]["text"].strip()[:2]
    await c.look("before")
    prefilled = await c.prefill(turn.prompt)
    leg = await c.decode(turn.prompt, prefilled.params, stop=[stop])
    c.note(finish=leg.body["choices"][0]["finish_reason"])
    c.note(**reference_summary(leg.body["kv_transfer_params"]))
    await c.look()


async def client_leaves_the_stream(c: Context) -> None:
    prompt = c.fresh(106)
    prefilled = await c.prefill(prompt)
    asked = {"model": c.target.model, "prompt": prompt, "max_tokens": 200, "ignore_eos": True}
    asked["kv_transfer_params"] = prefilled.params
    status, events = await c.target.stream("D", COMPLETIONS, asked, events=2)
    c.note(status=status, events=len(events))
    await c.look()


async def without_transfer_fields(c: Context) -> None:
    leg = await c.ask("D", prompt=c.fresh(106), max_tokens=OUTPUT, ignore_eos=True)
    c.note(D=leg.summary())
    await c.look()


async def two_choices(c: Context) -> None:
    prompt = c.fresh(106)
    prefilled = await c.prefill(prompt)
    leg = await c.decode(prompt, prefilled.params, n=2, temperature=1.0)
    c.note(D=leg.summary(), choices=len(leg.body["choices"]))
    await c.look()


# --- what goes in, how it comes out -----------------------------------------------------------


async def ids_in_a_chat(c: Context) -> None:
    prompt = c.fresh(106)
    messages = [{"role": "user", "content": "These words are not looked at."}]
    params = {**COLD, "prompt_token_ids": prompt}
    asked: dict[str, Any] = {"messages": messages, "path": CHAT, "ignore_eos": True}
    prefilled = await c.ask("P", max_tokens=1, kv_transfer_params=params, **asked)
    params = {**prefilled.params, "prompt_token_ids": prompt}
    leg = await c.ask("D", max_tokens=OUTPUT, kv_transfer_params=params, **asked)
    c.note(P=prefilled.summary(), D=leg.summary(), body=types(leg.body))
    c.note(echoed=leg.body["prompt_token_ids"] == prompt)
    c.note(right=leg.output == (await c.truth(prompt)).output)
    await c.look()


async def refused_before_they_are_scheduled(c: Context) -> None:
    """Requests that must not reach the scheduler, and do no harm."""
    messages = [{"role": "user", "content": "Hi"}]
    tries: dict[str, tuple[str, Params]] = {
        "params_are_text": (COMPLETIONS, {"prompt": [1], "kv_transfer_params": "x"}),
        "params_are_a_list": (COMPLETIONS, {"prompt": [1], "kv_transfer_params": []}),
        "no_ids": (CHAT, {"messages": messages, "kv_transfer_params": {"prompt_token_ids": []}}),
        "ids_are_text": (
            CHAT,
            {"messages": messages, "kv_transfer_params": {"prompt_token_ids": ["a"]}},
        ),
        "no_prompt": (COMPLETIONS, {"kv_transfer_params": COLD}),
        "no_messages": (CHAT, {"kv_transfer_params": COLD}),
        "empty_messages": (CHAT, {"messages": [], "kv_transfer_params": COLD}),
        "message_is_text": (CHAT, {"messages": ["x"]}),
        "options_without_stream": (
            COMPLETIONS,
            {"prompt": [1], "stream_options": {"include_usage": True}},
        ),
        "two_greedy_choices": (COMPLETIONS, {"prompt": [1], "n": 2}),
        "too_long": (COMPLETIONS, {"prompt": [7] * 5000, "kv_transfer_params": COLD}),
        "too_many_tokens": (COMPLETIONS, {"prompt": [7], "max_tokens": 100_000}),
        "no_such_model": (COMPLETIONS, {"model": "nobody", "prompt": [1]}),
    }
    for name, (path, body) in tries.items():
        leg = await c.ask("P", path, **{"max_tokens": 1, **body})
        c.note(**{name: leg.summary()})
    await c.look()


async def streamed_chat(c: Context) -> None:
    """Without transfer fields: nobody gave a reference, nobody gets one."""
    asked = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": OUTPUT}
    asked |= {"model": c.target.model, "ignore_eos": True}
    status, events = await c.target.stream("D", CHAT, asked)
    c.note(status=status, kinds=kinds(events), shapes=shapes(events))


async def streamed_chat_with_everything(c: Context) -> None:
    asked = {"messages": [{"role": "user", "content": "Name a river."}], "return_token_ids": True}
    await _streamed(c, CHAT, asked, {"kvloop_stream_reference": True})


async def streamed_completion_with_everything(c: Context) -> None:
    asked = {"prompt": c.fresh(106), "return_token_ids": True}
    await _streamed(c, COMPLETIONS, asked, {"kvloop_stream_reference": True})


async def _streamed(c: Context, path: str, body: Params, extra: Params) -> None:
    asked = {"model": c.target.model, "temperature": 0, "ignore_eos": True, **body}
    prefilled = await c.ask("P", path, **{**asked, "max_tokens": 1, "kv_transfer_params": COLD})
    asked |= {"max_tokens": OUTPUT, "kv_transfer_params": {**prefilled.params, **extra}}
    asked["stream_options"] = {"include_usage": True}
    status, events = await c.target.stream("D", path, asked)
    c.note(status=status, kinds=kinds(events), shapes=shapes(events))
    for event in map(json.loads, events[:-1]):
        c.remember("D", event)
    await c.look()


# --- last: they leave something behind --------------------------------------------------------


async def leak_of_a_request_that_nobody_tracks(c: Context) -> None:
    """Transfer fields that ask for nothing: blocks that no read, release or TTL ends."""
    params = {"do_remote_prefill": False, "do_remote_decode": False}
    asked = {"prompt": c.fresh(106), "max_tokens": 1, "ignore_eos": True}
    leg = await c.ask("P", kv_transfer_params=params, **asked)
    c.note(leg=leg.summary())
    await c.look("held", ("P",))
    c.note(release=(await c.release(leg.params, by="D")).summary())
    await c.look("released", ("P",))


def kinds(events: list[str]) -> list[str]:
    """What the events of a stream are, runs of the same kind as one: how many is chance."""
    found: list[str] = []
    for event in map(_kind, events):
        if found[-1:] != [event]:
            found.append(event)
    return found


def shapes(events: list[str]) -> Params:
    """Each kind's fields and types, of its first event."""
    said: Params = {}
    for event in events:
        if event != "[DONE]":
            said.setdefault(_kind(event), types(json.loads(event)))
    return said


def _kind(event: str) -> str:
    if event == "[DONE]":
        return event
    said = json.loads(event)
    if "error" in said:
        return "error"
    if said["object"] == "kvloop.stream_reference":
        return "reference"
    if not said["choices"]:
        return "usage"
    (choice,) = said["choices"]
    if choice["finish_reason"]:
        return "end"
    return "role" if "role" in choice.get("delta", {}) else "text"


STEPS: list[Step] = [
    cold_prefill,
    decode_after_prefill,
    next_turn_pulls_and_decodes,
    pull_of_the_whole_reference,
    pull_of_a_whole_prompt,
    second_use,
    shorter_prompt_untrimmed,
    shorter_prompt_trimmed,
    edited_history_untrimmed,
    edited_history_trimmed,
    another_conversation,
    below_threshold,
    covered_by_the_local_cache,
    partly_in_the_local_cache,
    partly_cached_and_the_rest_below_threshold,
    a_wrong_pull_poisons_the_cache,
    another_salt_shares_no_cache,
    decode_finds_its_own_cache,
    prefill_read_twice,
    expired_reference_is_refused,
    reference_without_an_expiry,
    unknown_engine_id,
    known_engine_at_another_port,
    unknown_request_id,
    decode_cannot_load,
    release_of_a_decode_pin,
    release_of_a_prefill_lease,
    release_at_an_unknown_engine,
    lease_and_ttl_end_by_themselves,
    one_token,
    stop_token,
    stop_string,
    client_leaves_the_stream,
    without_transfer_fields,
    ids_in_a_chat,
    refused_before_they_are_scheduled,
    streamed_chat,
    streamed_chat_with_everything,
    streamed_completion_with_everything,
    two_choices,
    leak_of_a_request_that_nobody_tracks,
]
