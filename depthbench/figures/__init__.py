"""Plotly figures from data frames: no torch, no Streamlit, no files. Used by the dashboard and by reports.

Each module offers a function that prepares a frame holding exactly what will be shown (the CSV of the figure), and a function
that draws that frame.
"""
