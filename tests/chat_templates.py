"""Short chat templates in the manner of model families, for tests of what templates do with earlier
turns.
"""

_CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

#: Drops the reasoning of answers before the last user message, and writes an empty one for a last
# answer without.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set"
    " ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' +"
    " m.role + '\\n' }}{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>')"
    " %}{% set reasoning = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else ''"
    " %}{% if loop.index0 > ns.last and (loop.last or reasoning) %}{{ '<think>\\n' + reasoning +"
    " '\\n</think>\\n\\n' }}{% endif %}{{ parts[-1].lstrip('\\n') }}{% else %}{{ m.content }}{%"
    " endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    + _CHATML_PROMPT
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)

#: Opens the reasoning in the generation prompt, and drops it from every answer, the last one
# included.
R1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)

#: Always has a system turn, and strips contents.
LLAMA_3_1 = (
    "{% set system, turns = (messages[0].content, messages[1:]) if messages[0].role == 'system'"
    " else ('', messages) %}{{ bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nCutting"
    " Knowledge Date: December 2023\\n\\n' }}{{ system | trim + '<|eot_id|>' }}{% for m in turns"
    " %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim +"
    " '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

#: Calls the assistant `model`, strips contents, and refuses system messages.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{ m.content | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

#: Has no generation prompt, and writes the system message into the last user turn.
MISTRAL = (
    "{% set system, turns = (messages[0].content, messages[1:]) if messages[0].role == 'system'"
    " else ('', messages) %}{% set last_user = turns | selectattr('role', 'equalto', 'user') | list"
    " | last %}{{ bos_token }}{% for m in turns %}{% if m.role == 'user' %}{{ '[INST] ' + (system +"
    " '\\n\\n' if system and m == last_user else '') }}{{ m.content + '[/INST]' }}{% else %}{{ ' '"
    " + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)

#: ChatML with a default system message.
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nYou"
    " are SmolLM.<|im_end|>\\n' }}{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content +"
    " '<|im_end|>\\n' }}{% endfor %}" + _CHATML_PROMPT
)

TEMPLATES = {
    "Qwen3": QWEN3,
    "R1": R1,
    "Llama 3.1": LLAMA_3_1,
    "Gemma": GEMMA,
    "Mistral": MISTRAL,
    "SmolLM2": SMOLLM2,
}
