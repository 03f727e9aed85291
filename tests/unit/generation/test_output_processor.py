import pytest

from mlx_parallm.generation.output_processor import OutputProcessor
from mlx_parallm.generation.scheduler.updates import SequenceUpdate
from mlx_parallm.types.errors import StepError
from mlx_parallm.types.events import ErrorEvent, FinishReason, PromptEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import SampledToken, TokenLogprob
from tests.fakes import EOS, ByteTokenizer
from tests.token_events import token_event


def started(request_id="r", **params):
    processor = OutputProcessor()
    add(processor, request_id, **params)
    return processor


def add(processor, request_id, **params):
    request = GenerateRequest(
        request_id=request_id, model="m", prompt_ids=(1,), params=SamplingParams(**params)
    )
    processor.add(request, ByteTokenizer())


def update(token=None, request_id="r", index=0, logprob=None, **fields):
    sampled = None if token is None else SampledToken(seq_id=9, token_id=token, logprob=logprob)
    return SequenceUpdate(request_id=request_id, index=index, token=sampled, **fields)


def feed(processor, data, last=None):
    """Process a step per byte, then ``last``; return all events and the stopped samples."""
    events, stopped = [], []
    updates = [update(byte) for byte in data] + ([last] if last is not None else [])
    for each in updates:
        step = processor.process([each])
        events += step.events
        stopped += step.stopped
    return events, stopped


def text(events):
    return "".join(event.text for event in events)


def test_every_token_is_an_event_and_half_characters_are_held_back():
    events, _ = feed(started(), "aé".encode())
    assert [(e.token_ids, e.text) for e in events] == [
        ((97,), "a"),
        ((0xC3,), ""),
        ((0xA9,), "é"),
    ]


def test_the_end_token_is_reported_but_not_shown():
    processor = started()
    events, stopped = feed(processor, b"hi", update(EOS, finish_reason=FinishReason.STOP))
    assert text(events) == "hi"
    assert (events[-1].token_ids, events[-1].finish_reason, events[-1].stop_reason) == (
        (EOS,),
        FinishReason.STOP,
        None,
    )
    assert stopped == []
    assert len(processor) == 0


@pytest.mark.parametrize(("is_forced", "shown"), [(True, "hi"), (False, "hi!")])
def test_an_end_token_that_the_limit_forced_is_not_shown(is_forced, shown):
    last = update(ord("!"), finish_reason=FinishReason.LENGTH, is_forced_end=is_forced)
    events, _ = feed(started(), b"hi", last)
    assert text(events) == shown
    assert (events[-1].token_ids, events[-1].finish_reason) == ((ord("!"),), FinishReason.LENGTH)


@pytest.mark.parametrize(("include", "shown"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_is_shown_only_when_asked_for(include, shown):
    last = update(ord("!"), finish_reason=FinishReason.STOP, stop_reason=ord("!"))
    events, _ = feed(started(include_stop_str_in_output=include), b"hi", last)
    assert text(events) == shown
    assert events[-1].stop_reason == ord("!")


def test_the_models_end_is_never_shown():
    last = update(ord("!"), finish_reason=FinishReason.STOP)
    events, _ = feed(started(include_stop_str_in_output=True), b"hi", last)
    assert text(events) == "hi"


def test_the_last_token_before_the_length_limit_is_shown():
    events, _ = feed(started(), b"hi", update(ord("!"), finish_reason=FinishReason.LENGTH))
    assert text(events) == "hi!"
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_the_end_brings_the_text_that_was_held_back():
    processor = started(stop=("END",))
    events, _ = feed(processor, b"so EN", update(0xC3, finish_reason=FinishReason.LENGTH))
    assert [e.text for e in events[-3:]] == ["", "", "EN\ufffd"]


@pytest.mark.parametrize(("include", "shown"), [(False, "so "), (True, "so END")])
def test_a_stop_string_ends_the_sample_and_frees_it(include, shown):
    processor = started(stop=("END",), include_stop_str_in_output=include)
    events, stopped = feed(processor, b"so END")
    assert text(events) == shown
    assert (events[-1].finish_reason, events[-1].stop_reason) == (FinishReason.STOP, "END")
    assert stopped == [("r", 0)]
    assert len(processor) == 0


def test_updates_after_a_stop_string_are_dropped():
    processor = started(stop=("x",), n=2)
    feed(processor, b"x")
    step = processor.process([update(97), update(98, index=1)])
    assert [token_event(event).index for event in step.events] == [1]


def test_a_stop_string_in_the_last_token_needs_no_freeing():
    events, stopped = feed(
        started(stop=("!",)), b"hi", update(ord("!"), finish_reason=FinishReason.LENGTH)
    )
    assert (events[-1].finish_reason, events[-1].stop_reason) == (FinishReason.STOP, "!")
    assert stopped == []


def test_stop_strings_are_ignored_in_the_first_min_tokens():
    events, stopped = feed(started(stop=("b",), min_tokens=3), b"abbab")
    assert text(events) == "abba"
    assert events[-1].stop_reason == "b"
    assert stopped == [("r", 0)]


def test_logprobs_travel_with_their_token():
    logprob = TokenLogprob(97, -0.5, ((97, -0.5),))
    step = started(logprobs=1).process([update(97, logprob=logprob)])
    assert token_event(step.events[0]).logprobs == (logprob,)


def test_the_prompt_event_comes_before_the_first_token():
    prompt = PromptEvent(request_id="r", num_cached_tokens=4)
    step = started().process([update(97, prompt=prompt)])
    assert step.events[0] is prompt
    assert isinstance(step.events[1], TokenEvent)


def test_a_prompt_without_a_token_is_one_event():
    prompt = PromptEvent(request_id="r", num_cached_tokens=4)
    assert started().process([update(prompt=prompt)]).events == [prompt]


def test_an_aborted_sample_ends_without_a_token():
    events, _ = feed(started(), b"", update(finish_reason=FinishReason.ABORT))
    assert (events[0].token_ids, events[0].finish_reason) == ((), FinishReason.ABORT)


def test_a_failed_request_has_one_error_event_and_its_other_samples_are_freed():
    processor = started(n=3)
    add(processor, "other")
    step = processor.process(
        [update(error="boom"), update(error="boom", index=2), update(97, request_id="other")]
    )
    error, token = step.events
    assert isinstance(error, ErrorEvent)
    assert isinstance(error.error, StepError)
    assert str(error.error) == "boom"
    assert token.request_id == "other"
    assert step.stopped == [("r", 1)]
    assert len(processor) == 1


def test_nothing_follows_an_error():
    processor = started(n=2)
    step = processor.process([update(error="boom"), update(97, index=1)])
    assert len(step.events) == 1
    assert processor.process([update(97, index=1)]).events == []


def test_a_removed_request_is_forgotten():
    processor = started()
    processor.remove("r")
    processor.remove("unknown")
    assert processor.process([update(97)]).events == []


def test_a_request_stays_until_all_its_samples_ended():
    processor = started(n=2)
    processor.process([update(EOS, finish_reason=FinishReason.STOP)])
    assert len(processor) == 1
    processor.process([update(EOS, index=1, finish_reason=FinishReason.STOP)])
    assert len(processor) == 0


def test_the_end_from_outside_brings_the_text_that_was_held_back():
    processor = started(n=2, stop=("xyz",))
    processor.process([update(byte) for byte in b"axy"])
    events = [token_event(event) for event in processor.end("r")]
    assert [(e.index, e.text, e.token_ids) for e in events] == [(0, "xy", ()), (1, "", ())]
    assert {e.finish_reason for e in events} == {FinishReason.ABORT}
    assert processor.end("r") == []
    assert processor.process([update(98)]).events == []


def test_a_sample_that_has_not_begun_costs_no_detokenizer():
    class Counting(ByteTokenizer):
        made = 0

        def detokenizer(self, **options):
            self.made += 1
            return super().detokenizer(**options)

    tokenizer, processor = Counting(), OutputProcessor()
    request = GenerateRequest(
        request_id="r", model="m", prompt_ids=(1,), params=SamplingParams(n=128)
    )
    processor.add(request, tokenizer)
    assert tokenizer.made == 0
    processor.process([update(97, index=5), update(98, index=5)])
    assert tokenizer.made == 1
