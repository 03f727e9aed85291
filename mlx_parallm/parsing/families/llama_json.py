"""Llama 3 and 4 write a call as a bare JSON object, sometimes after ``<|python_tag|>``.

An object is a call only at the beginning or after that marker, and only if a tool has its name.
Calls are separated by semicolons, as in vLLM's parser, or by nothing, as in its Llama 4 template.

Sources: the chat template of meta-llama/Llama-3.1-8B-Instruct; vLLM's llama_tool_parser and
tool_chat_template_llama4_json.jinja.
"""

from __future__ import annotations

from mlx_parallm.parsing.families.json_calls import read_call_object
from mlx_parallm.parsing.formats import CallText, ReadContext, ToolFormat
from mlx_parallm.parsing.reader import Steps

PYTHON_TAG = "<|python_tag|>"


def _bare_calls(context: ReadContext) -> Steps[None]:
    yield from context.reader.skip_space()
    yield from _calls(context, needs_known_name=True)


def _marked_calls(context: ReadContext) -> Steps[None]:
    yield from context.reader.expect(PYTHON_TAG)
    yield from context.reader.skip_space()
    yield from _calls(context, needs_known_name=False)


def _calls(context: ReadContext, *, needs_known_name: bool) -> Steps[None]:
    reader = context.reader
    while True:
        yield from read_call_object(context, ends=(PYTHON_TAG,), needs_known_name=needs_known_name)
        yield from reader.skip_space()
        yield from reader.accept(";")
        yield from reader.skip_space()
        if not (yield from reader.next_is("{")):
            reader.rewind()
            return


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    summary='{"name": …, "parameters": {…}}',
    call=_marked_calls,
    markers=(PYTHON_TAG,),
    detect=lambda template, _: '"parameters": ' in template and "ipython" in template,
    starts=(PYTHON_TAG,),
    bare=_bare_calls,
    bare_starts=("{",),
    forced=CallText('{"name": "$name", "parameters": $arguments}', separator="; "),
)
