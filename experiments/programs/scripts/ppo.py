"""Train an agent with stable-baselines3."""

from stable_baselines3 import PPO

model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, device="cuda")
model.learn(128)
print("true steps", 2 * 2 * 2)
