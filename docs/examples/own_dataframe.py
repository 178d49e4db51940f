"""Train on your own frames of pandas: three made-up hospitals share scikit-learn's tumours."""

from sklearn.datasets import load_breast_cancer

from fedsilo import simulate

frame = load_breast_cancer(as_frame=True).frame  # 30 numbers of a biopsy, and 'data.target'
hospitals = {"north": frame[:250], "south": frame[250:400], "east": frame[400:]}
settings = {"rounds": 10, "train.learning-rate": 0.01}
run = simulate("fedprox", silos=hospitals, label="target", settings=settings, name="own-frame")

print(run.sites)
print(run.metrics.query("split == 'test' and metric == 'accuracy' and round == 10"))
print(run.predictions("north", "test"))
