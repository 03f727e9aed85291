"""Short chat templates that refuse or drop what those of known families do."""

_TURN = "<{{ m.role }}>{{ m.content }}"
_CALLS = "{% for c in m.tool_calls or [] %}!{{ c.function.arguments | tojson }}{% endfor %}"

#: Takes everything.
FREE = "{% for m in messages %}" + _TURN + _CALLS + "{% endfor %}"
#: As Qwen3.5: a system message must be the first.
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + _TURN
    + _CALLS
    + "{% endfor %}"
)
#: As MiniMax M2: a later system message is dropped.
SYSTEM_DROPPED = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + _TURN
    + _CALLS
    + "{% endif %}{% endfor %}"
)
#: As Gemma 2, with calls: no system message, and turns alternate.
NO_SYSTEM = (
    "{% set ns = namespace(turns=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.turns % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set ns.turns = ns.turns + 1 %}{% endif %}" + _TURN + _CALLS + "{% endfor %}"
)
#: As Llama 3.x: one call a turn, without text beside it.
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<{{ m.role }}>" + _CALLS + "{% else %}" + _TURN + "{% endif %}{% endfor %}"
)
#: As Mistral Nemo: the system message is written in the last message, if that is a user's.
SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}" + _CALLS + "{% endif %}{% endfor %}"
)
#: As functionary: arguments are a text.
TEXT_ARGUMENTS = (
    "{% for m in messages %}" + _TURN + "{% for c in m.tool_calls or [] %}"
    "{{ '!' + c.function.arguments }}{% endfor %}{% endfor %}"
)
TEMPLATES = {
    "free": FREE,
    "system first": SYSTEM_FIRST,
    "system dropped": SYSTEM_DROPPED,
    "no system": NO_SYSTEM,
    "one call": ONE_CALL,
    "system last": SYSTEM_LAST,
    "text arguments": TEXT_ARGUMENTS,
}
