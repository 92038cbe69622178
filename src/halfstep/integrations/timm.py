"""timm"""
