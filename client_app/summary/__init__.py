"""A hospital's answer to a survey of its data: counts above its floor, the same every time.

This folder imports the session and everything below it. The first answer depends only on the data
set that the run names; later surveys get the same answer.
"""
