"""``fedsilo survey``: the data that the sites hold, before training, as JSON and as a page.

It imports report, deploy and run. The sites are asked in ``server_app.run.survey``, and answer in
``client_app.survey``.
"""
