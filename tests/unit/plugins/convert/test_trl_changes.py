"""Python that may change a value of a TRL script: it is asked about, never left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollover.plugins.convert.mapping import Unknown
from rollover.plugins.convert.trl.script import options_of_trl_script

TRAIN = """
trainer = GRPOTrainer(model="m", reward_funcs=right, args=config)
trainer.train()
"""
PARSER = "p = ArgumentParser()\np.add_argument('--lr', type=float, default=1e-6)\n"
PARSED = PARSER + "args = p.parse_args()\n"
FROM_NAME = "config = GRPOConfig('out', learning_rate=lr)\n"
FROM_ARGS = "config = GRPOConfig('out', learning_rate=args.lr)\n"
CONFIG = "config = GRPOConfig('out', learning_rate=1e-6)\n"
CLASS = "@dataclass\nclass Run:\n    lr: float = 1e-6\n"
FROM_RUN = "run = Run()\nconfig = GRPOConfig('out', learning_rate=run.lr)\n"

IN_DOUBT = {
    "try": "try:\n    import vllm\n    lr = 1\nexcept ImportError:\n    lr = 2\n" + FROM_NAME,
    "try behind a value": "lr = 1\ntry:\n    f()\nexcept ImportError:\n    lr = 2\n" + FROM_NAME,
    "name of an exception": "lr = 1\ntry:\n    f()\nexcept ValueError as lr:\n    pass\n" + FROM_NAME,
    "match": "lr = 1\nmatch size:\n    case 1:\n        lr = 2\n" + FROM_NAME,
    "captured by match": "lr = 1\nmatch size:\n    case lr:\n        pass\n" + FROM_NAME,
    "loop": "lr = 1\nfor step, lr in enumerate([2, 3]):\n    pass\n" + FROM_NAME,
    "with": "lr = 1\nwith f() as lr:\n    pass\n" + FROM_NAME,
    "walrus": "lr = 1\nif (lr := 2) > 1:\n    pass\n" + FROM_NAME,
    "walrus of a call": "lr = 1\nprint(lr := 2)\n" + FROM_NAME,
    "import": "lr = 1\nfrom mine import lr\n" + FROM_NAME,
    "import of every name": "lr = 1\nfrom mine import *\n" + FROM_NAME,
    "deleted": "lr = 1\ndel lr\n" + FROM_NAME,
    "global": "lr = 1\ndef f():\n    global lr\n    lr = 2\nf()\n" + FROM_NAME,
    "exec": "lr = 1\nexec(open('conf.py').read())\n" + FROM_NAME,
    "globals": "lr = 1\nglobals()['lr'] = 2\n" + FROM_NAME,
    "augmented": "lr = 1\nlr *= 2\n" + FROM_NAME,
    "item of an item": "c = {'a': {'lr': 1}}\nc['a']['lr'] = 2\nlr = c['a']['lr']\n" + FROM_NAME,
    "item of another name": "c = {'lr': 1}\nd = c\nd['lr'] = 2\nlr = c['lr']\n" + FROM_NAME,
    "dict that a function changes": "def f(d):\n    d['lr'] = 2\nc = {'lr': 1}\nf(c)\nlr = c['lr']\n" + FROM_NAME,
    "dict that is given away": "c = dict(lr=1)\nupdated(c)\nlr = c['lr']\n" + FROM_NAME,
    "popped": "c = {'lr': 1}\nx = c.pop('lr')\nlr = c['lr']\n" + FROM_NAME,
    "words of a parser": PARSER + "args = p.parse_args(['--lr', '2'])\n" + FROM_ARGS,
    "namespace of a parser": PARSER + "args = p.parse_args(namespace=n)\n" + FROM_ARGS,
    "two defaults": PARSED + "q.add_argument('--lr', default=2)\n" + FROM_ARGS,
    "defaults by a table": PARSED + "p.set_defaults(**table)\n" + FROM_ARGS,
    "attribute of args": PARSED + "args.lr *= 8\n" + FROM_ARGS,
    "one of several": PARSED + "args.lr, x = 1, 2\n" + FROM_ARGS,
    "update of vars": PARSED + "vars(args).update(lr=9e-6)\n" + FROM_ARGS,
    "item of vars": PARSED + "vars(args)['lr'] = 9e-6\n" + FROM_ARGS,
    "item of named vars": PARSED + "table = vars(args)\ntable['lr'] = 9e-6\n" + FROM_ARGS,
    "item of __dict__": PARSED + "args.__dict__['lr'] = 9e-6\n" + FROM_ARGS,
    "setattr on args": PARSED + "setattr(args, 'lr', 2)\n" + FROM_ARGS,
    "setattr of any name": PARSED + "for k in x:\n    setattr(args, k, 2)\n" + FROM_ARGS,
    "function of the file": "def f(a):\n    a.lr = 2\n" + PARSED + "f(args)\n" + FROM_ARGS,
    "function elsewhere": PARSED + "setup(args)\n" + FROM_ARGS,
    "method of a class": CLASS + "    def f(self):\n        self.lr *= 10\n" + FROM_RUN,
    "loop of a class": CLASS + "    def f(self):\n        for k in x:\n            setattr(self, k, 1)\n" + FROM_RUN,
    "method of a base": CLASS + "    def f(self):\n        self.lr *= 10\nclass Run(Run):\n    pass\n" + FROM_RUN,
    "given to the constructor": CLASS + "    def __post_init__(self):\n        self.lr *= 10\n"
    "config = GRPOConfig('out', learning_rate=Run(lr=2).lr)\n",
    "attribute of a class": CLASS + "Run.lr = 2\n" + FROM_RUN,
    "field": CONFIG + "config.learning_rate *= 4\n",
    "field of several": CONFIG + "config.learning_rate, x = f()\n",
    "field by a function": "def f(c):\n    c.learning_rate = 2\n" + CONFIG + "f(config)\n",
    "field by another name": CONFIG + "c = config\nc.learning_rate = 2\n",
    "field of an uncalled function": "def f(config):\n    config.learning_rate = 2\n" + CONFIG,
    "fields by setattr": CONFIG + "for k in x:\n    setattr(config, k, 1)\n",
    "field by setattr": CONFIG + "setattr(config, 'learning_rate', 2)\n",
    "fields by a method": CONFIG + "config.set_optimizer(learning_rate=2)\n",
    "fields by a function elsewhere": CONFIG + "setup(config)\n",
}  # fmt: skip


def options_of(script: str, train: str = TRAIN) -> dict[str, Any]:
    return options_of_trl_script("from mine import right\n" + script + train, Path("train.py"))


@pytest.mark.parametrize("name", IN_DOUBT)
def test_value_that_may_have_changed_is_asked_about(name: str) -> None:
    options = options_of(IN_DOUBT[name])
    assert isinstance(options.get("learning_rate"), Unknown) or isinstance(options.get("args"), Unknown)


@pytest.mark.parametrize("change", ["trainer.args.learning_rate = 2", "trainer.beta = 0.1", "trainer.args.a.b *= 2"])
def test_trainer_that_is_changed_is_asked_about(change: str) -> None:
    options = options_of(CONFIG, TRAIN.replace("trainer.train()", change))
    assert any(name.startswith("trainer.") and isinstance(value, Unknown) for name, value in options.items())


CERTAIN = {
    "handler that raises": "try:\n    lr = 5\nexcept ValueError:\n    raise\n" + FROM_NAME,
    "with": "with f() as x:\n    lr = 5\n" + FROM_NAME,
    "comprehension": "lr = 5\nx = [lr for lr in range(3)]\n" + FROM_NAME,
    "printed args": PARSED.replace("1e-6", "5") + "print(args)\nwandb.init(config=vars(args))\n" + FROM_ARGS,
    "args of a function": PARSED.replace("1e-6", "5") + "def f(a):\n    g(a.lr)\nf(args)\n" + FROM_ARGS,
    "assigned field": CONFIG + "config.learning_rate = 5\nprint(config.to_dict())\n",
    "own field": CLASS + "    def __init__(self):\n        self.rate = 5\n"
    "config = GRPOConfig('out', learning_rate=Run().rate)\n",
}  # fmt: skip


@pytest.mark.parametrize("name", CERTAIN)
def test_value_that_nothing_changes_is_read(name: str) -> None:
    options = options_of(CERTAIN[name])
    assert options["learning_rate"] == 5 and "args" not in options


def test_value_of_a_branch_is_read_within_it() -> None:
    lines = ["if a:", "lr = 5", *FROM_NAME.splitlines(), *TRAIN.splitlines()]
    assert options_of("\n    ".join(lines), "")["learning_rate"] == 5


@pytest.mark.parametrize("start", ["if a:\n    lr = 1\nelse:", "if a:\n    lr = 1\n    if b:\n        lr = 2"])
def test_value_of_another_branch_is_asked_about(start: str) -> None:
    lines = [start, *FROM_NAME.splitlines(), *TRAIN.splitlines()]
    assert isinstance(options_of("\n    ".join(lines), "")["learning_rate"], Unknown)
