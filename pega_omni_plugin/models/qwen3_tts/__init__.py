"""Qwen3-TTS: text to speech by a talker, a code predictor and a streaming waveform decoder."""
