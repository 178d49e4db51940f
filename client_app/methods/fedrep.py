"""FedRep at a site: FedPer that trains the head first, then the rest with the new head fixed."""

from fedsilo.client_app.methods.base import Lab, SiteNetwork
from fedsilo.client_app.methods.fedper import FedPerSite
from fedsilo.client_app.training.loop import Objective
from fedsilo.core.errors import SiteError
from fedsilo.models.methods.fedrep import FedRepSettings


class FedRepSite(FedPerSite):
    """Trains the head and the representation one after the other within a round."""

    settings: FedRepSettings
    trains_stacked = True

    def fit(self, lab: Lab, network: SiteNetwork) -> None:
        """Train only the personal head, and then only the shared arrays.

        Together the two trainings have as many steps as a usual round of this run. The head gets
        the share 'fedrep.head-share' of the steps, rounded, and each training at least one step.
        Only the second training reports its loss. Afterwards head and shared arrays are both
        trainable.

        Raises:
            SiteError: a round has fewer than two steps, although each training needs one, or a
                training diverged.
            RefusedError: the hospital's limits forbid a training.
        """
        steps = lab.privacy.steps(lab.sampling)
        if steps < 2:
            raise SiteError(
                f"site {lab.site} takes {steps} step a round, but {lab.common.method} needs one "
                "for the head and one for the rest: raise 'train.local-epochs' or "
                "'train.local-steps'"
            )
        first = self.settings.head_steps(steps)
        own, trained = set(self.settings.personal(network)), dict(network.named_parameters())
        head = [name for name, p in trained.items() if name in own and p.requires_grad]
        rest = [name for name, p in trained.items() if name not in own and p.requires_grad]
        for part, count, aside in ((head, first, ("head",)), (rest, steps - first, ())):
            # Frozen parameters get no gradient, so each training moves only its own part
            for name in (*head, *rest):
                trained[name].requires_grad_(name in part)
            objective = None
            if part is rest:
                objective = self.body_objective(lab, network)
            lab.fit(network, steps=count, aside=aside, objective=objective)
        # The head must be trainable again, as it was before this training
        for name in head:
            trained[name].requires_grad_(True)

    def body_objective(self, lab: Lab, network: SiteNetwork) -> Objective | None:
        """Return the loss for training the shared arrays; None, the default, for the usual loss."""
        return None
