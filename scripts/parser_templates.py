"""Published chat templates that render the turns for the parsers' tests."""

from __future__ import annotations

from dataclasses import dataclass

LLAMA_CPP = "llama_cpp_python 0.3.36, vendor/llama.cpp/models/templates"
VLLM = "vllm 0.33.0, examples"
THINK = "deepseek_r1"


@dataclass(frozen=True, slots=True)
class Template:
    """A template and its expected formats.

    Attributes:
        file: its file name.
        model: the model of the template.
        tools: the name of its tool-call format.
        reasoning: the name of its reasoning format; None: it has none.
        package: the package and the folder of the file.
        ends: texts that may end the assistant's turn, besides the template's ``eos_token``.
        vocabulary: tokens that detection needs and the template does not show.
        leaves_out: parts that it does not write: ``reasoning``, ``text`` beside calls, ``several``
            calls, or unchanged arguments (``arguments``; its one-call cases are kept).
        skips: names of cases that it does not write faithfully.
        reasoning_key: the key of a message's reasoning; ``blocks``: a block of the content.
        has_fixtures: True if its turns are fixtures; other turns are only compared.
    """

    file: str
    model: str
    tools: str
    reasoning: str | None = None
    package: str = LLAMA_CPP
    ends: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    leaves_out: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    reasoning_key: str = "reasoning_content"
    has_fixtures: bool = True


_IM_END = "<|im_end|>"
_V3_END = "<｜end▁of▁sentence｜>"
_COHERE_END = "<|END_OF_TURN_TOKEN|>"
_TEXT = ("text",)
_BARE = ("reasoning",)
_TEXT_BARE = ("text", "reasoning")
_ONE = ("text", "reasoning", "several")

TEMPLATES = (
    Template("Qwen-Qwen3-0.6B.jinja", "Qwen/Qwen3-0.6B", "hermes", THINK, ends=(_IM_END,)),
    Template(
        "Qwen-Qwen2.5-7B-Instruct.jinja",
        "Qwen/Qwen2.5-7B-Instruct",
        "hermes",
        ends=(_IM_END,),
        leaves_out=_BARE,
        has_fixtures=False,
    ),
    Template(
        "Qwen-QwQ-32B.jinja",
        "Qwen/QwQ-32B",
        "hermes",
        THINK,
        ends=(_IM_END,),
        leaves_out=_BARE,
        has_fixtures=False,
    ),
    Template(
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
        "NousResearch/Hermes-2-Pro-Llama-3-8B",
        "hermes",
        ends=(_IM_END,),
        leaves_out=_TEXT_BARE,
    ),
    Template(
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
        "NousResearch/Hermes-3-Llama-3.1-8B",
        "hermes",
        ends=(_IM_END,),
        leaves_out=_TEXT_BARE,
        has_fixtures=False,
    ),
    Template(
        "Bielik-11B-v3.0-Instruct.jinja",
        "speakleash/Bielik-11B-v3.0-Instruct",
        "hermes",
        THINK,
        ends=(_IM_END,),
        has_fixtures=False,
    ),
    Template(
        "MiMo-VL.jinja",
        "XiaomiMiMo/MiMo-VL-7B-RL",
        "hermes",
        ends=(_IM_END,),
        leaves_out=_BARE,
        has_fixtures=False,
    ),
    Template(
        "Reka-Edge.jinja",
        "RekaAI/reka-edge",
        "hermes",
        THINK,
        ends=("\n\n<sep>",),
        leaves_out=_BARE,
        has_fixtures=False,
    ),
    Template(
        "ibm-granite-granite-4.0.jinja",
        "ibm-granite/granite-4.0",
        "hermes",
        ends=("<|end_of_text|>",),
        leaves_out=_BARE,
    ),
    Template(
        "ibm-granite-granite-4.1.jinja",
        "ibm-granite/granite-4.1",
        "hermes",
        ends=("<|end_of_text|>",),
        leaves_out=_BARE,
        has_fixtures=False,
    ),
    Template(
        "Qwen3-Coder.jinja",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "qwen3_coder",
        ends=(_IM_END,),
        leaves_out=_BARE,
    ),
    Template("Qwen3.5-4B.jinja", "Qwen/Qwen3.5-4B", "qwen3_coder", THINK, ends=(_IM_END,)),
    Template(
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "qwen3_coder",
        THINK,
        ends=(_IM_END,),
        has_fixtures=False,
    ),
    Template(
        "StepFun3.5-Flash.jinja",
        "stepfun-ai/Step-3.5-Flash",
        "qwen3_coder",
        THINK,
        ends=(_IM_END,),
        has_fixtures=False,
    ),
    Template(
        "ByteDance-Seed-OSS.jinja",
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "seed_oss",
        "seed_oss",
        ends=("<seed:eos>",),
    ),
    Template("MiniMax-M2.jinja", "MiniMaxAI/MiniMax-M2", "minimax_m2", THINK, ends=("[e~[",)),
    Template(
        "deepseek-ai-DeepSeek-V3.2.jinja",
        "deepseek-ai/DeepSeek-V3.2",
        "deepseek_v32",
        THINK,
        ends=(_V3_END,),
    ),
    Template(
        "deepseek-ai-DeepSeek-V4.jinja",
        "deepseek-ai/DeepSeek-V4",
        "deepseek_v32",
        THINK,
        ends=(_V3_END,),
    ),
    Template(
        "deepseek-ai-DeepSeek-V4-Flash-0731.jinja",
        "deepseek-ai/DeepSeek-V4-Flash",
        "deepseek_v32",
        THINK,
        ends=(_V3_END,),
        has_fixtures=False,
    ),
    Template("muse-glimmer.jinja", "Muse Glimmer", "muse_spark", "muse_spark", leaves_out=_TEXT),
    Template(
        "openbmb-MiniCPM5-1B.jinja", "openbmb/MiniCPM5-1B", "minicpm5", THINK, ends=(_IM_END,)
    ),
    Template("GLM-4.6.jinja", "zai-org/GLM-4.6", "glm45", THINK),
    Template("GLM-4.7-Flash.jinja", "zai-org/GLM-4.7-Flash", "glm45", THINK),
    Template(
        "Spark2.5.jinja", "iFlytek Spark 2.5", "glm45", THINK, ends=(_V3_END,), has_fixtures=False
    ),
    Template(
        "inclusionai-ling-3.0-flash.jinja",
        "inclusionAI/Ling-3.0-flash",
        "glm45",
        THINK,
        ends=("<|role_end|>",),
        has_fixtures=False,
    ),
    Template(
        "poolside-Laguna-S-2.1.jinja",
        "poolside/Laguna-S-2.1",
        "glm45",
        THINK,
        ends=("</assistant>",),
        has_fixtures=False,
    ),
    Template(
        "poolside-Laguna-XS.2.jinja",
        "poolside/Laguna-XS.2",
        "glm45",
        THINK,
        ends=("</assistant>",),
        has_fixtures=False,
    ),
    Template(
        "moonshotai-Kimi-K2.jinja",
        "moonshotai/Kimi-K2-Instruct",
        "kimi_k2",
        ends=(_IM_END,),
        leaves_out=_BARE,
    ),
    Template("Kimi-K3.jinja", "moonshotai/Kimi-K3", "kimi_k3", "kimi_k3", ends=("<|end_of_msg|>",)),
    Template(
        "tool_chat_template_deepseekr1.jinja",
        "deepseek-ai/DeepSeek-R1-0528",
        "deepseek_v3",
        THINK,
        VLLM,
        ends=(_V3_END,),
        leaves_out=_BARE,
    ),
    Template(
        "tool_chat_template_deepseekv3.jinja",
        "deepseek-ai/DeepSeek-V3-0324",
        "deepseek_v3",
        None,
        VLLM,
        ends=(_V3_END,),
        leaves_out=_BARE,
        has_fixtures=False,
    ),
    Template(
        "deepseek-ai-DeepSeek-V3.1.jinja",
        "deepseek-ai/DeepSeek-V3.1",
        "deepseek_v31",
        THINK,
        ends=(_V3_END,),
        leaves_out=_BARE,
    ),
    Template(
        "Mistral-Small-3.2-24B-Instruct-2506.jinja",
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
        "mistral",
        leaves_out=_TEXT_BARE,
    ),
    Template(
        "mistralai-Ministral-3-14B-Reasoning-2512.jinja",
        "mistralai/Ministral-3-14B-Reasoning-2512",
        "mistral",
        "mistral",
        reasoning_key="blocks",
    ),
    Template(
        "unsloth-mistral-Devstral-Small-2507.jinja",
        "mistralai/Devstral-Small-2507, by unsloth",
        "mistral",
        leaves_out=_BARE,
        has_fixtures=False,
    ),
    Template(
        "mistralai-Mistral-Nemo-Instruct-2407.jinja",
        "mistralai/Mistral-Nemo-Instruct-2407",
        "mistral_json",
        leaves_out=_TEXT_BARE,
    ),
    Template(
        "tool_chat_template_mistral.jinja",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "mistral_json",
        None,
        VLLM,
        leaves_out=_TEXT_BARE,
        has_fixtures=False,
    ),
    Template(
        "meta-llama-Llama-3.1-8B-Instruct.jinja",
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama3_json",
        ends=("<|eot_id|>",),
        leaves_out=_ONE,
    ),
    Template(
        "meta-llama-Llama-3.3-70B-Instruct.jinja",
        "meta-llama/Llama-3.3-70B-Instruct",
        "llama3_json",
        ends=("<|eot_id|>",),
        leaves_out=_ONE,
        has_fixtures=False,
    ),
    Template(
        "tool_chat_template_llama4_json.jinja",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "llama3_json",
        None,
        VLLM,
        ends=("<|eot|>",),
        leaves_out=_TEXT_BARE,
        skips=("no call",),
    ),
    Template(
        "tool_chat_template_llama4_pythonic.jinja",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "llama4_pythonic",
        None,
        VLLM,
        ends=("<|eot|>",),
        vocabulary=("<|eot|>",),
        leaves_out=(*_TEXT_BARE, "arguments"),
    ),
    Template(
        "tool_chat_template_llama3.2_pythonic.jinja",
        "meta-llama/Llama-3.2-3B-Instruct",
        "pythonic",
        None,
        VLLM,
        ends=("<|eot_id|>",),
        leaves_out=(*_TEXT_BARE, "arguments"),
        skips=("unicode",),
    ),
    Template(
        "LFM2.5-8B-A1B.jinja",
        "LiquidAI/LFM2.5-8B-A1B",
        "lfm2",
        THINK,
        ends=(_IM_END,),
        skips=("lines and quotes",),
    ),
    Template(
        "Olmo-3.1-32B-Instruct.jinja",
        "allenai/Olmo-3.1-32B-Instruct",
        "olmo3",
        package="a public script for mlx_lm that quotes the template",
        leaves_out=_BARE,
    ),
    Template(
        "tool_chat_template_granite.jinja",
        "ibm-granite/granite-3.1-8b-instruct",
        "granite",
        None,
        VLLM,
        ends=("<|end_of_text|>",),
        leaves_out=_TEXT_BARE,
    ),
    Template(
        "tool_chat_template_hunyuan_a13b.jinja",
        "tencent/Hunyuan-A13B-Instruct",
        "jamba",
        "hunyuan_a13b",
        VLLM,
        ends=("<|eos|>",),
        leaves_out=_BARE,
        skips=(
            "no call",
            "reasoning before an answer",
        ),
    ),
    Template(
        "unsloth-Apriel-1.5.jinja",
        "ServiceNow-AI/Apriel-1.5-15b-Thinker, by unsloth",
        "jamba",
        ends=("\n<|end|>",),
        leaves_out=_BARE,
        has_fixtures=False,
    ),
    Template(
        "MiniMax-M1.jinja",
        "MiniMaxAI/MiniMax-M1-80k",
        "jamba",
        ends=("<end_of_sentence>",),
        leaves_out=_TEXT_BARE,
    ),
    Template(
        "NVIDIA-Nemotron-Nano-v2.jinja",
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        "nemotron_json",
        THINK,
        ends=("<SPECIAL_12>",),
        leaves_out=_TEXT_BARE,
        skips=("no call",),
    ),
    Template(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
        "CohereLabs/c4ai-command-r7b-12-2024",
        "cohere_command3",
        "cohere_command3",
        ends=(f"{_COHERE_END}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",),
        leaves_out=_TEXT,
        skips=("reasoning before an answer",),
    ),
    Template(
        "Cohere2MoE.jinja",
        "CohereLabs, Cohere2MoE",
        "cohere_command3",
        "cohere_command3",
        ends=(_COHERE_END,),
        leaves_out=_TEXT,
    ),
    Template(
        "tool_chat_template_functiongemma.jinja",
        "google/functiongemma-270m-it",
        "functiongemma",
        None,
        VLLM,
        ends=("<end_of_turn>",),
        leaves_out=(*_TEXT_BARE, "arguments"),
    ),
    Template(
        "google-gemma-4-31B-it.jinja",
        "google/gemma-4-31b-it",
        "gemma4",
        "gemma4",
        ends=("<|tool_response>", "<turn|>"),
        skips=("reasoning before an answer",),
    ),
    Template(
        "google-gemma-4-31B-it-interleaved.jinja",
        "google/gemma-4-31b-it, interleaved thinking",
        "gemma4",
        "gemma4",
        ends=("<turn|>",),
        has_fixtures=False,
        skips=("reasoning before an answer",),
    ),
    Template(
        "openai-gpt-oss-120b.jinja",
        "openai/gpt-oss-120b",
        "openai",
        "openai_gptoss",
        leaves_out=("text", "several"),
        reasoning_key="thinking",
    ),
)
