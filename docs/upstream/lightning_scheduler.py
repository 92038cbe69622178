"""Lightning advances the learning rate after a step that the GradScaler skipped."""

import logging
import tempfile
import warnings

import torch

try:
    import lightning
    from lightning.pytorch.plugins.precision import MixedPrecision
except ImportError:
    lightning = None


def main() -> int:
    """Train one step whose gradients overflow; return 1 if the scheduler moved."""
    if lightning is None:
        print("not applicable: no lightning")
        return 2

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch):
            return self.layer(batch).sum() * float("inf")

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, folder = Model(), tempfile.TemporaryDirectory()
    with folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_steps=1,
            plugins=[plugin],
            accelerator="cpu",
            enable_checkpointing=False,
            default_root_dir=folder.name,
            **options,
        )
        weight = model.layer.weight.item()
        trainer.fit(model, torch.utils.data.DataLoader(torch.ones(1, 1)))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    print("expected: weight unchanged, learning rate 1 (no update was made)")
    print(
        f"found:    weight {'unchanged' if model.layer.weight.item() == weight else 'changed'}, learning rate {rate:g}"
    )
    return int(rate != 1)


if __name__ == "__main__":
    raise SystemExit(main())
