"""A hospital's answer to a survey of its data: counts above its floor, the same every time.

Imports the session and everything below it. The first answer depends only on the data set, as the
run names it; later surveys get the same answer.
"""
