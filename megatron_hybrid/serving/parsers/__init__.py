"""Parsers of answers: text in pieces -> content, reasoning, and calls of functions.

One file a form of calls; `choice` finds the one of a model, `answer_parser` cuts its answers.
"""
