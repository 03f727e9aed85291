"""The generator of docs/configuration.md from the table of settings; a test checks the page."""

from __future__ import annotations

import re
from pathlib import Path

from mlx_parallm.cli.former_settings import FORMER_SETTINGS, FormerSetting
from mlx_parallm.cli.setting import GROUPS, Setting
from mlx_parallm.cli.settings import SETTINGS

#: Sentences of a description in a cell of a table; the others follow below the table.
CELL_SENTENCES = 2
TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

Every setting of `mlx_parallm serve` can be set in three ways.
Flags override environment variables, which override the file, which overrides the defaults.

| way | example |
|---|---|
| flag | `--max-num-seqs 64`; lists take several values, or repeat the flag |
| environment | `MLX_PARALLM_MAX_NUM_SEQS=64`; lists are separated by commas or written as JSON |
| file | `max-num-seqs: 64` in YAML or `max_num_seqs = 64` in TOML; `-` and `_` are equivalent |

Models may be given without `--model`, as in `mlx_parallm serve ORG/MODEL --port 8001`.
Write them before flags that take several values, because these would take the models as values.
A misspelt flag ends the process with status 2 and a suggestion.

- `--config FILE` or `MLX_PARALLM_CONFIG` names the file.
- The keys of a file are the names of the flags, or their aliases; an unknown key is an error.
- A wrong value ends the process with status 2 and a message that names the setting and its source.
- `--no-NAME` turns a switch off; in the environment and in files switches take `true` or `false`.
- Settings that end in `-bytes` take sizes such as `512M` or `8GiB` (powers of 1024).
- Timeouts and intervals are in seconds; settings that end in `-ms` are in milliseconds.
- An empty environment variable counts as not set.
- At start, a warning lists variables that begin with `MLX_PARALLM_` but name no setting.

## Settings of one model

Some settings may differ between models; their descriptions say so.

- With flags, repeat the flag: `--max-model-len 32768 --max-model-len ./my-model=4096`.
- In a variable, separate the values by commas.
- In a file, write a table: `max-model-len: {./my-model: 4096}`.

A value without a model applies to all models that have no value of their own.
`--max-model-len` has two further rules:

- With several models, a length without a model does not raise a model's own shorter context.
- A length for one model, or for the only model, is refused if it exceeds the model's own context.

`--max-source-len` of the only model is refused beyond the positions that its encoder learned.
With several models it is cut to them.

## A settings file

```yaml
# serve.yaml: mlx_parallm serve --config serve.yaml
model: [mlx-community/Qwen3-0.6B-4bit, ./my-model]
served-model-name: [mlx-community/Qwen3-0.6B-4bit=qwen, ./my-model=mine]
host: 0.0.0.0
api-key: [a-long-secret]
max-num-seqs: 64
kv-cache-memory-bytes: 8GiB
```

`mlx_parallm batch` takes the same settings.
Exceptions are those of address and access, and those of files and batches.
`make docs` generates this page.
"""

FORMER = """\
## Former settings

These go with the next version.
Until then flags, variables and files may have them: they are read as before, with a warning.
A former setting beside its replacement, both as flags, is an error, and so in the other places.

| setting | use instead |
|---|---|
"""


def render() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for group in GROUPS:
        settings = [setting for setting in SETTINGS if setting.group == group]
        header = "| flag | environment | default | what it does |\n|---|---|---|---|\n"
        rows = "\n".join(row(setting) for setting in settings)
        parts.append(f"## {group[0].upper()}{group[1:]}\n\n{header}{rows}\n")
        notes = [note for setting in settings for note in notes_of(setting)]
        if notes:
            parts.append("\n".join(notes) + "\n")
    parts.append(FORMER + "\n".join(former_row(former) for former in FORMER_SETTINGS) + "\n")
    return "\n".join(parts)


def sentences_of(setting: Setting) -> list[str]:
    """Return the sentences of a setting's description, with links to other pages."""
    text = re.sub(r"docs/([a-z-]+\.md)", r"[\1](\1)", setting.help.replace("|", "\\|"))
    return re.split(r"(?<=\.) (?=[A-Z])", f"{text[0].upper()}{text[1:]}")


def notes_of(setting: Setting) -> list[str]:
    """Return a list item with the sentences that a cell has no room for; none if there is room."""
    rest = sentences_of(setting)[CELL_SENTENCES:]
    return [f"- `--{setting.name}`: " + "\n  ".join(rest)] if rest else []


def row(setting: Setting) -> str:
    """Return a setting's row of the table."""
    flags = [f"`--{name}`" for name in (setting.name, *setting.aliases)]
    if setting.is_switch:
        flags[0] += f", `--no-{setting.name}`"
    cells = (
        ", ".join(flags),
        f"`{setting.variable}`",
        default(setting),
        " ".join(sentences_of(setting)[:CELL_SENTENCES]),
    )
    return f"| {' | '.join(cells)} |"


def former_row(former: FormerSetting) -> str:
    """Return the row of a former setting."""
    advice = former.advice
    if former.new is not None:
        advice = advice.replace(former.new, f"`--{former.new}`")
    return f"| `{former.name}` | {advice} |"


def default(setting: Setting) -> str:
    """Return the default value as users write it."""
    if setting.is_switch:
        return "on" if setting.default else "off"
    if setting.default in (None, (), ""):
        return ""
    return f"`{' '.join(setting.default) if setting.is_list else setting.default}`"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
