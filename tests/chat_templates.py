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

#: Tools in the system turn, calls in tags, results in a turn of the user (Qwen2.5's kind).
TOOLS_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role =="
    " 'system' else '') + '<tools>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{"
    " '</tools><|im_end|>\\n' }}{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' +"
    " messages[0].content + '<|im_end|>\\n' }}{% endif %}{% for m in messages %}{% if m.role =="
    " 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{% elif m.role =="
    " 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% if m.reasoning_content %}{{ '<think>\\n' +"
    " m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}{% if m.tool_calls"
    " %}{% for c in m.tool_calls %}{{ '\\n' if m.content or not loop.first else '' }}{{"
    ' \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}{{'
    " c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{% endif %}{{"
    " '<|im_end|>\\n' }}{% elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' +"
    " m.content + '\\n</tool_response><|im_end|>\\n' }}{% endif %}{% endfor %}" + _CHATML_PROMPT
)

#: One call, without the text beside it; results are of `ipython` (Llama 3.1's kind).
TOOLS_LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{"
    " '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{ m.content | tojson }}{{ '<|eot_id|>'"
    " }}{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('This"
    " model only supports single tool-calls at once!') }}{% endif %}{% set f ="
    ' m.tool_calls[0].function %}{{ \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name":'
    " \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}{% else"
    " %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim +"
    " '<|eot_id|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

#: Ids of nine letters and digits, a list of calls, and the system message in the last user turn.
TOOLS_MISTRAL = (
    "{% set system, turns = (messages[0].content, messages[1:]) if messages[0].role == 'system'"
    " else ('', messages) %}{% set last_user = turns | selectattr('role', 'equalto', 'user') | list"
    " | last %}{{ bos_token }}{% for m in turns %}{% if m.role == 'user' %}{{ '[INST] ' + (system +"
    " '\\n\\n' if system and m == last_user else '') + m.content + '[/INST]' }}{% elif m.role =="
    " 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be"
    " alphanumeric strings with length 9!') }}{% endif %}{{ '[TOOL_RESULTS] {\"content\": ' }}{{"
    " m.content | tojson }}{{ ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}{% elif"
    " m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{"
    " raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif"
    ' %}{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments |'
    " tojson }}{{ ', \"id\": \"' + c.id + '\"}' + ('' if loop.last else ', ') }}{% endfor %}{{ ']'"
    " + eos_token }}{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)

#: The first call alone, ended by `<|call|>`. The content or reasoning of its turn is an analysis, left
# out once an answer without calls follows (gpt-oss's kind).
TOOLS_HARMONY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not"
    " m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages"
    " %}{% if m.tool_calls %}{% if (m.content or m.thinking) and loop.index0 > ns.last %}{{"
    " '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>'"
    " }}{% endif %}{% set f = m.tool_calls[0].function %}{{"
    " '<|start|>assistant<|channel|>commentary to=functions.' + f.name + ' json<|message|>' }}{{"
    " f.arguments | tojson }}{{ '<|call|>' }}{% elif m.role == 'assistant' %}{{"
    " '<|start|>assistant<|channel|>final<|message|>' + m.content }}{{ '<|return|>' if loop.last"
    " and not add_generation_prompt else '<|end|>' }}{% elif m.role == 'tool' %}{{"
    " '<|start|>functions to=assistant<|message|>' + m.content + '<|end|>' }}{% else %}{{"
    " '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

#: Opens the reasoning in the generation prompt, and closes an empty one in answers without.
TOOLS_OPENED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{{"
    " '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}{{ m.content }}{% for c in"
    " m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '(' }}{{ c.function.arguments |"
    " tojson }}{{ ')</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

#: Ends the generation prompt with a closed thought, which no turn has. No model has this format: Gemma
# 4 has such tokens, but ends calls with `<|tool_response>` and goes on in the same turn.
TOOLS_THOUGHT = (
    "{% for m in messages %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n'"
    " }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name"
    " }}{{ c.function.arguments | tojson }}{{ '<tool_call|>' }}{% endfor %}{{ '<turn|>\\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n<|channel>thought\\n<channel|>'"
    " }}{% endif %}"
)

#: Writes an answer after results without the header that a prompt has (DeepSeek-V3's kind), and takes
#: arguments as text only.
TOOLS_HEADLESS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ '<|result|>' + m.content +"
    " '<|end|>' }}{% elif m.role == 'assistant' %}{{ '' if loop.previtem.role == 'tool' else"
    " '<|Assistant|>' }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<|call|>' +"
    " c.function.name + c.function.arguments }}{% endfor %}{{ eos_token }}{% else %}{{ '<|User|>' +"
    " m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{%"
    " endif %}"
)

#: Writes the text beside the calls of a last answer as a turn of its own (Nemotron Nano 2's kind).
TOOLS_TWO_TURNS = (
    "{% for m in messages %}{% if m.content %}{{ '<|im_start|>' + m.role + '\\n' + m.content +"
    " '<|im_end|>\\n' }}{% endif %}{% for c in m.tool_calls or [] %}{{ '<|im_start|>assistant\\n' +"
    " c.function.name }}{{ c.function.arguments | tojson }}{{ '<|im_end|>\\n' }}{% endfor %}{%"
    " endfor %}" + _CHATML_PROMPT
)
