"""What makes a model file: conversion of folders, and quantization."""
