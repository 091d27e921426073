"""Conversations as text: the chat template of the model, or messages with blank lines between."""

import json

import pytest

from quark.demo.text import model_directory
from quark.torch.evaluation.chats import join_messages, render_chat, renderer_of
from quark.torch.evaluation.documents import load_documents
from quark.torch.evaluation.samples import read_conversations

EACH = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
TEMPLATE = "{{ bos_token }}" + EACH + "{{ eos_token }}"
CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


@pytest.fixture
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_directory())


def test_a_template_writes_the_text(tokenizer):
    assert renderer_of(tokenizer)(CHAT) == "Why?\n\nBecause." == join_messages(CHAT)
    tokenizer.chat_template = TEMPLATE
    assert renderer_of(tokenizer)(CHAT) == "[user] Why? [assistant] Because. "
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(ValueError, match="template of the model refuses messages: no system"):
        render_chat(tokenizer, CHAT)


def test_conversations_of_a_file(tokenizer, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join([json.dumps({"messages": CHAT}), json.dumps(CHAT[:1])]))
    with pytest.raises(ValueError, match="has no chat template, which messages need"):
        read_conversations(file, tokenizer)
    tokenizer.chat_template = TEMPLATE
    texts = ["[user] Why? [assistant] Because. ", "[user] Why? "]
    assert read_conversations(file, tokenizer) == texts
    image = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    file.write_text(json.dumps(image))
    with pytest.raises(ValueError, match="names images or audio: only 'quark quantize'"):
        read_conversations(file, tokenizer)


def test_chats_in_a_field_of_a_data_set(tokenizer, tmp_path):
    pytest.importorskip("datasets")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"turns": CHAT}))
    tokenizer.chat_template = TEMPLATE
    assert load_documents(file, text_field="turns") == ["Why?\n\nBecause."]
    texts = load_documents(file, text_field="turns", render=renderer_of(tokenizer))
    assert texts == ["[user] Why? [assistant] Because. "]
