"""The engine behind HTTP, as OpenAI's clients speak it (https://platform.openai.com/docs/api-reference).

Needs the extra `serve`.
"""
