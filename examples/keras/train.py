"""Train the Keras model of job.py within a budget, in a loop of one's own, and save it as Keras."""

import argparse

import torch

import outcore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--memory", default="60%")
    parser.add_argument("--save", default="unet.keras")
    given = parser.parse_args()
    outcore.keras.require_keras()  # loads Triton before TensorFlow, which has to be second

    import job

    torch.manual_seed(0)
    model = job.model(width=given.width)
    twin = outcore.keras.to_torch(model).train()
    optimizer = job.optimizer(twin.parameters())
    outcore.within(twin, [(8, 64, 64, 1)], memory=given.memory, optimizer=optimizer)
    for step in range(given.steps):
        images, masks = job.batch(8)
        loss = job.loss(twin(images), masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")
    outcore.release(twin)
    outcore.keras.write_back(twin, model).save(given.save)
    print(f"wrote {given.save}")


if __name__ == "__main__":
    main()
