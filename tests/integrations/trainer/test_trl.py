"""TRL's `SFTTrainer`: text that it prepares itself, and images that an encoder prepares."""

from types import SimpleNamespace

import pytest

from evenpack.integrations.trainer import PackedTrainerMixin
from evenpack.integrations.trainer.settings import refuse_arguments, refuse_loss
from evenpack.models import adapter_for
from evenpack.scheduler.testing import run_ranks

from .tiny import Recorder, losses_of, relative

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

STEPS = 3


class PackedSFT(PackedTrainerMixin, trl.SFTTrainer):
    """What a user writes."""


@pytest.fixture(scope="module")
def tokenizer():
    from demo.tokenizer import train_tokenizer

    return train_tokenizer()


def model_of(tokenizer):
    """Return the demo's Qwen2.5-VL, which divides by the number of targets that the Trainer tells it."""
    from demo.model import build_model

    model = build_model("qwen2_5_vl", tokenizer, 0)
    model.accepts_loss_kwargs = True
    return model


def arguments(folder, **settings):
    """Return an `SFTConfig` for the CPU."""
    defaults = dict(
        output_dir=str(folder), use_cpu=True, bf16=False, max_steps=STEPS, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no", optim="sgd", learning_rate=0.05, activation_checkpointing=False,
    )  # fmt: skip
    return trl.SFTConfig(**{**defaults, **settings})


@pytest.mark.full
def test_text_with_lora_equals_stock_trainer(tmp_path, tokenizer):
    from peft import LoraConfig

    rows = [{"prompt": "What is it? " * (1 + index % 4), "completion": f" It is {index}."} for index in range(18)]
    data = datasets.Dataset.from_list(rows)

    def train(kind, per_device, accumulation, **more):
        recorder = Recorder()
        args = arguments(
            tmp_path, per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation, data_seed=3
        )
        lora = LoraConfig(r=2, target_modules=r".*language_model.*(q_proj|v_proj)", init_lora_weights="gaussian")
        trainer = kind(
            model_of(tokenizer), args, train_dataset=data, processing_class=tokenizer, callbacks=[recorder], peft_config=lora,
            **more,
        )  # fmt: skip
        trainer.train()
        return losses_of(trainer), recorder.gradients

    def fn(rank, num_ranks):
        ours = train(PackedSFT, 3, 1, packing={"max_tokens": 96, "timeout": 30.0})
        return ours, train(trl.SFTTrainer, 1, 3)

    for (losses, gradients), (expected, others) in run_ranks(fn, 2, backend="gloo", timeout=120):
        assert losses == pytest.approx(expected, abs=1e-5) and len(losses) == STEPS
        assert max(map(relative, gradients, others)) < 1e-5


def test_images_in_messages_with_lora(tmp_path, tokenizer):
    """Pictures that lie in the messages, not in a column: TRL would run its template over them."""
    from demo.processing import make_processor
    from peft import LoraConfig
    from PIL import Image

    from evenpack.collate import SampleEncoder

    processor = make_processor("qwen2_5_vl", tokenizer)
    chats = []
    for index in range(8):
        size = (60 + 14 * index, 84)
        Image.new("RGB", size, f"hsl({40 * index}, 80%, 50%)").save(tmp_path / f"{index}.png")
        media = [{"type": "image", "path": str(tmp_path / f"{index}.png")}] if index % 2 else []
        question = {"role": "user", "content": [*media, {"type": "text", "text": "What is it? " * (1 + index % 4)}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"It is {index}."}]}
        chats.append({"messages": [question, answer], "sample_id": index})
    data = datasets.Dataset.from_list(chats)
    lora = LoraConfig(r=2, target_modules=r".*language_model.*(q_proj|v_proj)", init_lora_weights="gaussian")

    def fn(rank, num_ranks):
        model = model_of(tokenizer)
        encoder = SampleEncoder(processor, adapter_for(model.config), min_pixels=56 * 56, max_pixels=1024 * 1024)
        settings = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, max_length=None)
        trainer = PackedSFT(
            model, arguments(tmp_path, **settings), train_dataset=data, eval_dataset=data.select(range(4)),
            processing_class=processor,
            peft_config=lora, encode=encoder.encode, adapter=encoder.adapter, packing={"max_tokens": 512, "timeout": 30.0},
        )  # fmt: skip
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer._packing_adapter.trained_modalities == (), "the tower is frozen: no pack needs a dummy image"
        return list(losses_of(trainer)), before - trainer.evaluate(data.select(range(4)))["eval_loss"]

    for steps, gain in run_ranks(fn, 2, backend="gloo", timeout=120):
        assert steps == [1, 2, 3] and gain > 0


def test_images_through_an_encoder(tmp_path, tokenizer):
    from demo.data import ChatExample, ChatExamples
    from demo.processing import encode, make_processor

    processor, examples = make_processor("qwen2_5_vl", tokenizer), ChatExamples(0, 0, 2)
    rows = []
    for index in range(8):
        messages = examples[index].messages
        texts = [{"role": turn["role"], "content": turn["content"][-1]["text"]} for turn in messages]
        images = [part["image"] for turn in messages for part in turn["content"] if part["type"] == "image"]
        rows.append({"messages": texts, "images": images})

    def encode_row(row):
        user, assistant = row["messages"]
        pictures = [{"type": "image", "image": image} for image in row["images"]]
        content = [*pictures, {"type": "text", "text": user["content"]}]
        answer = [{"type": "text", "text": assistant["content"]}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        return encode(processor, ChatExample(messages, "row"))

    def fn(rank, num_ranks):
        trainer = PackedSFT(
            model_of(tokenizer), arguments(tmp_path, per_device_train_batch_size=2, max_length=None),
            train_dataset=datasets.Dataset.from_list(rows), processing_class=processor, encode=encode_row,
            packing={"max_tokens": 1024, "timeout": 30.0},
        )  # fmt: skip
        trainer.train()
        return list(losses_of(trainer))

    assert run_ranks(fn, 2, backend="gloo") == [[1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("setting", "value"), [("packing", True), ("padding_free", True), ("loss_type", "dft"), ("activation_offloading", True)]
)
def test_settings_of_trl_are_refused(setting, value):
    args = SimpleNamespace(accelerator_config=None, **{setting: value})
    with pytest.raises(ValueError, match=f"{setting}={value!r}"):
        refuse_arguments(args)


@pytest.mark.parametrize("name", ["DPOTrainer", "GRPOTrainer", "RewardTrainer"])
def test_trainers_of_other_losses_are_pointed_to_the_recipes(name):
    kind = type("Packed", (PackedTrainerMixin, getattr(trl, name)), {})
    with pytest.raises(ValueError, match=rf"{name}.compute_loss does not work with packing.*beyond-sft"):
        refuse_loss(kind)
