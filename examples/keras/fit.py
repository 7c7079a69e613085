"""Train the Keras model of job.py with its own ``fit`` within a budget, on TensorFlow or with KERAS_BACKEND=torch."""

import argparse

import outcore

keras = outcore.keras.require_keras()  # loads Triton before TensorFlow, which has to be second

import job  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", default="70%", help="budget: 500MiB, or a share of what plain training takes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", default="unet.keras")
    chosen = parser.parse_args()

    model = job.model()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.BinaryCrossentropy(from_logits=True))
    outcore.within(model, [(8, 64, 64, 1)], memory=chosen.memory)
    images, masks = job.batch(8 * chosen.steps)
    model.fit(images.numpy(), masks.numpy(), batch_size=8)
    outcore.release(model).save(chosen.save)
    print(f"wrote {chosen.save}")


if __name__ == "__main__":
    main()
