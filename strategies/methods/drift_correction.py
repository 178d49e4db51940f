"""Methods that correct the sites' drift, or their unequal numbers of steps, around FedAvg's round.

Drift means that a site's steps lead to the minimum of its own loss instead of the common one.
SCAFFOLD corrects each gradient, FedDyn the loss and the mean, FedNova the length of the updates,
and MOON keeps sites away from their own previous model.
"""

import math
from dataclasses import replace

import numpy as np

from fedsilo.core.array_names import arrays_below, is_statistic, with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.models.methods.feddyn import FedDynSettings
from fedsilo.models.methods.fednova import STEPS
from fedsilo.models.methods.moon import PROJECTION, MoonSettings, build_projection
from fedsilo.models.methods.scaffold import CONTROL, INVERSE_STEPS, SCAFFOLDSettings
from fedsilo.strategies.loop.method import Ask, Disclosures, Reply, State, initial_weights
from fedsilo.strategies.methods.fedavg import FedAvg

_ROUNDING = 1e-9  # the relative error of 1 / K
_LEAST_SHARE = 2.0**-16  # the least value of 1 / K


class SCAFFOLD(FedAvg):
    """Averages weights and control variates.

    Messages are FedAvg's, and ``control/<array>`` for each trained array, in both directions.
    Replies hold weights that moved by the site's mean update of one step, and the metric
    ``inverse-steps``. Only sums of these are needed, so they can be secret sums.
    """

    settings: SCAFFOLDSettings
    beside = (CONTROL,)

    def initial_state(self) -> State:
        """Return the network's initial weights, and the server's control variate of zeros.

        It has an array ``control/<name>`` for each trained array, but none for running statistics
        of batch norm.
        """
        model = self.starting_weights()
        controls = {}
        for name, array in model.items():
            if not is_statistic(name):
                controls[f"{CONTROL}{name}"] = np.zeros_like(array)
        return State(model | controls)

    def round(self, state: State, ask: Ask) -> State:
        """Let sites train with control variates, and update the model x and the server's variate c.

        Each asked site receives x and c. Site i takes K_i steps from x to y_i, and returns:

        - x + (y_i - x) / K_i, which is x plus the mean change per step,
        - c plus the change of the site's own control variate,
        - the metric 1 / K_i. Without secure aggregation, an impossible value makes the reply
          unusable.

        'server.aggregation' combines the arrays over sites. The mean of 1 / K_i is weighted by
        samples. A mean below 2^-16 is replaced by 2^-16. Then these are updated:

        - x moves by 'server-learning-rate' times the combined update, divided by the mean of 1 /
          K_i.
        - Running statistics of batch norm become the combined ones.
        - c moves by ``share`` times the combined change. ``share`` is the replying sites' share of
          all training samples.
        """
        model, controls = self.model(state), arrays_below(CONTROL, state.arrays)
        send = dict.fromkeys(ask.sites, state.arrays)
        before = dict.fromkeys(ask.sites, model)
        trained = ask(
            TRAIN,
            send,
            expect=send,
            reference=before,
            metrics=[INVERSE_STEPS],
            fault=self.implausible_steps,
        )
        # K if all sites take K steps; in a secret sum a faulty site could make the mean 0
        steps = 1 / max(trained.mean_metric(INVERSE_STEPS), _LEAST_SHARE)
        after = self.towards(trained, model, self.settings.server_learning_rate * steps)
        # c moves only by the share of sites that replied, as the others' variates are unchanged
        moved = self.average(trained, with_prefix(CONTROL, controls))
        share = self.share(trained)
        for name, control in controls.items():
            after[f"{CONTROL}{name}"] = control + share * (moved[f"{CONTROL}{name}"] - control)
        return replace(state, arrays=after)

    def implausible_steps(self, reply: Reply) -> str | None:
        """Explain why a reply's metric 1 / K cannot be true, or return None if it is plausible.

        K is the site's number of steps. It must be from 1 to ``most_steps`` for the site's samples,
        but need not be whole. The upper limit may be exceeded by a relative rounding error of 1e-9.
        """
        share, most = reply.metrics[INVERSE_STEPS], most_steps(self.common, reply.examples)
        if share <= 1 and share * most >= 1 - _ROUNDING:
            return None
        return f"metric '{INVERSE_STEPS}' is {share:g}, not 1 over 1 to {most} steps"

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: weights, control variates and the number of steps."""
        gradient = (
            "the mean gradient of the round's steps, with the weights and protected like them"
        )
        return super().disclosures().also(gradient).also(_steps_that_leave(self.common))


_H = "h/"  # the prefix of h in the state, which the checkpoint stores


class FedDyn(FedAvg):
    """Averages the weights, then moves past the mean by the server's drift term h.

    h accumulates the moves of the mean in all rounds, times -alpha. It is never sent.
    """

    settings: FedDynSettings
    beside = (_H,)

    def round(self, state: State, ask: Ask) -> State:
        """Average like FedAvg, then correct the mean by the server's drift term h.

        Each asked site receives the model and returns trained weights. 'server.aggregation'
        combines them into the mean. With alpha, the setting 'regularisation-alpha', two updates
        follow:

        - h becomes h - alpha * share * (mean - model), from 0 before round 1.
        - The new model is mean - h / alpha.

        ``share`` is the replying sites' share of all training samples. h stays in the state and is
        never sent. Running statistics of batch norm become the mean.
        """
        model, alpha = self.model(state), self.settings.regularisation_alpha
        trained = ask(TRAIN, dict.fromkeys(ask.sites, model))
        mean = self.average(trained, model)
        after = dict(mean)
        for name, averaged in mean.items():
            if is_statistic(name):
                continue
            moved = averaged.astype(np.float64) - model[name]
            # Sites that did not reply did not move, so their part of h stays
            h = state.arrays.get(f"{_H}{name}", 0.0) - alpha * self.share(trained) * moved
            after[name] = np.asarray(averaged - h / alpha, np.float32)
            after[f"{_H}{name}"] = np.asarray(h, np.float32)
        return replace(state, arrays=after)


class FedNova(FedAvg):
    """Moves in the mean direction of one step, as far as the sites' mean number of steps.

    Replies hold FedAvg's arrays, whose updates are divided by the site's steps, and the metric
    ``steps``. Only the sum of the divided updates is needed, so it can be a secret sum.
    """

    def round(self, state: State, ask: Ask) -> State:
        """Move the model by the sites' mean update of one step, times their mean number of steps.

        Each asked site divides its update by its number of steps, and returns the received weights
        plus the result. It also returns its number of steps as a metric. Without secure
        aggregation, an impossible number makes the reply unusable. 'server.aggregation' combines
        the arrays. The mean number of steps is weighted by samples. Running statistics of batch
        norm become their mean.
        """
        model = state.arrays
        trained = ask(
            TRAIN, dict.fromkeys(ask.sites, model), metrics=[STEPS], fault=self.implausible_steps
        )
        steps = trained.mean_metric(STEPS)
        return replace(state, arrays=self.towards(trained, model, steps))

    def implausible_steps(self, reply: Reply) -> str | None:
        """Explain why a reply's number of steps cannot be true, or return None if it is plausible.

        The number must be from 1 to ``most_steps``, the largest that is possible with the site's
        samples. It need not be whole.
        """
        steps, most = reply.metrics[STEPS], most_steps(self.common, reply.examples)
        if 1 <= steps <= most:
            return None
        return f"metric '{STEPS}' is {steps:g}, not 1 to {most}"

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: the weights and the number of steps."""
        return super().disclosures().also(_steps_that_leave(self.common))


def most_steps(common: CommonSettings, samples: int) -> int:
    """Return the largest number of optimiser steps that a site can take in a round.

    - If 'train.epoch-steps' is above 0, an epoch spans rounds, and each round has 'train.pace'
      steps.
    - Otherwise, if 'train.local-steps' is above 0, it is the number.
    - Otherwise the number is 'train.local-epochs' times the batches per epoch. The last batch may
      be small.

    Args:
        common: the run's settings.
        samples: the number of training samples at the site.
    """
    if common.epoch_steps and common.pace:
        return common.pace
    if common.local_steps and not common.epoch_steps:
        return common.local_steps
    # The last batch of an epoch may be small
    return common.local_epochs * math.ceil(samples / common.batch_size)


def _steps_that_leave(common: CommonSettings) -> str:
    """Describe in words that a site sends its number of steps, and who learns it."""
    steps = "the number of optimiser steps, each round"
    if common.trust == SUMS:
        steps += "; the server learns only the mean over sites"
    return steps


class Moon(FedAvg):
    """Averages the trained networks, including the projection heads (Li, He and Song 2021).

    Training messages in both directions: FedAvg's, and the projection head as
    ``projection/<name>``, float32. ``evaluate`` sends only the network, because predictions do not
    use the head. The sites compute the contrastive term (``client_app/methods/moon.py``).
    """

    settings: MoonSettings
    beside = (PROJECTION,)  # not part of the model, so that the model loads like FedAvg's

    def initial_state(self) -> State:
        """Return FedAvg's initial weights, and the projection head's as ``projection/<name>``."""
        head = build_projection(self.common.seed, self.blueprint.channels)
        named = with_prefix(PROJECTION, initial_weights(head))
        return State(self.starting_weights() | named)

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: the weights and the projection head."""
        return super().disclosures().also("the projection head, trained, each round")
