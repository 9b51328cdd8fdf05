"""Chat templates in the manner of well-known models, written for these tests."""

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|h|>assistant<|/h|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eom_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|h|>' + role + '<|/h|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\n\n' }}{%- endif %}"""

GEMMA = """{{ bos_token }}{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# no generation prompt: a reply simply follows; user and assistant must alternate, tool calls left out
MISTRAL = """{%- set ns = namespace(turn=0) %}
{%- for message in messages if message.role in ('user', 'assistant') and not message.tool_calls %}
    {%- if (message.role == 'user') != (ns.turn % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- set ns.turn = ns.turn + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] ' + (message.tool_calls | map(attribute='function') | list | tojson) + eos_token }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- else %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# thinking is cut from the history, and opened by the generation prompt; a reply without content is not shown
R1 = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'user' %}{{ '<|User|>' + message.content }}{% endif %}
{% if message.role == 'assistant' and message.content is string %}
{{ '<|Assistant|>' + message.content.split('</think>')[-1] + '<|end|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""

# two channels; the end of the last turn is another token than that of earlier ones
HARMONY = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if loop.last and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# content as a list of parts only
PARTS = """{% for message in messages %}{{ '<|' + message.role + '|>' }}
{% for part in message.content %}{{ part.text }}{% endfor %}{{ eos_token + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# a header without its line end before a call; content beside calls is left out; an answer of a tool needs its name
HERMES = """{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\n<tools> ' }}
    {%- for tool in tools %}{{- (tool.function | tojson) + ' ' }}{%- endfor %}
    {{- '</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'tool' and message.tool_calls is not defined %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"arguments": ' + (call.function.arguments | tojson) }}
            {{- ', "name": "' + call.function.name + '"}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {%- if message.name is not defined %}{{- raise_exception('a tool response needs a name') }}{%- endif %}
        {{- '<|im_start|>tool\n{"name": "' + message.name + '", "content": ' + message.content | tojson }}
        {{- '}<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# arguments are joined to text, so they have to be text; a reply needs a content; nothing opens a reply after a tool's
DEEPSEEK = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'tool' %}{{- '<|tool|>' + message.content + '<|/tool|>' }}
    {%- else %}
        {%- set inside = not loop.first and messages[loop.index0 - 1].role == 'tool' %}
        {{- ('' if inside else '<|Assistant|>') + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|call|>' + call.function.name + '\n' + call.function.arguments + '<|/call|>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|Assistant|>' }}{%- endif %}"""

# the last turn ends with a token more than the others
PHI3 = """{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

# nothing ends a turn but the mark of the next one
GLM = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|end|>\n' + message.content }}
        {%- for call in message.tool_calls or [] %}{{- call.function.name ~ call.function.arguments }}{%- endfor %}
    {%- else %}{{- ('<|return|>' if message.role == 'tool' else '<|start|>user') + '\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|end|>' }}{%- endif %}"""
