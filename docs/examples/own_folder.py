"""Train on your own images, sorted into SITE/CLASS/: ``python own_folder.py FOLDER``."""

import sys

from fedsilo import simulate

settings = {"dataset": "folder", "data.dir": sys.argv[1], "data.image-size": 32, "rounds": 3}
run = simulate("fedavg", settings=settings, name="own-folder")

print(run.sites)
print(run.metrics.query("split == 'test' and metric == 'accuracy'"))
print(run.predictions(run.sites.site[0], "test"))
