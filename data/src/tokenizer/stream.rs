//! Text from tokens as they come, each piece once it cannot change any more.

use super::{Tokenizer, TokenizerError};

/// What stands for bytes that are not, or not yet, UTF-8.
const REPLACEMENT: char = '\u{fffd}';

/// Decodes a text token by token. A character whose bytes are spread over several tokens comes out with the last of them, and a token's
/// leading space as it does in the whole text.
///
/// With a byte-level tokenizer the pieces are together exactly what [`Tokenizer::decode`] gives for all tokens. One that falls back to
/// bytes may judge bytes anew by what follows; of broken ones, which no text has, a piece once given out then stays as it was.
#[derive(Debug)]
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    skip_special_tokens: bool,
    /// The tokens of the last piece, before which decoders treat a text's beginning in their own way, and those held back since.
    window: Vec<u32>,
    /// How many of them are the last piece's, and their text.
    given_tokens: usize,
    given: String,
}

impl<'t> TextStream<'t> {
    /// At the beginning of a text.
    pub fn new(tokenizer: &'t Tokenizer, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, window: Vec::new(), given_tokens: 0, given: String::new() }
    }

    /// The text that this token makes final; empty while its last character is unfinished.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizerError> {
        self.window.push(token);
        let text = self.tokenizer.decode(&self.window, self.skip_special_tokens)?;
        if text.ends_with(REPLACEMENT) {
            return Ok(String::new());
        }
        let piece = behind(&self.given, &text);
        if !piece.is_empty() {
            self.window.drain(..self.given_tokens);
            self.given_tokens = self.window.len();
            self.given = self.tokenizer.decode(&self.window, self.skip_special_tokens)?;
        }
        Ok(piece)
    }

    /// What is left at the end of the text: bytes that no token completed, replaced.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn rest(&self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.window, self.skip_special_tokens)?;
        Ok(behind(&self.given, &text))
    }
}

/// The part of `text` behind what it has in common with `given`.
fn behind(given: &str, text: &str) -> String {
    let common: usize =
        given.chars().zip(text.chars()).take_while(|(one, other)| one == other).map(|(one, _)| one.len_utf8()).sum();
    text[common..].to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::testing::byte_tokenizer;
    use serde_json::json;

    /// One that marks spaces and falls back to bytes, as Llama's first ones do.
    fn falling_back() -> Tokenizer {
        let mut vocabulary: serde_json::Map<String, serde_json::Value> =
            (0..256_u32).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
        for (token, id) in [("\u{2581}Hello", 256), ("\u{2581}world", 257), ("<unk>", 258)] {
            vocabulary.insert(token.to_owned(), id.into());
        }
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": [{"id": 259, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true, "unk_token": "<unk>"},
        });
        Tokenizer::from_json(tokenizer.to_string().as_bytes()).unwrap()
    }

    /// The piece of each token, and what is left at the end.
    fn pieces(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<String> {
        let mut stream = TextStream::new(tokenizer, true);
        let mut pieces: Vec<String> = tokens.iter().map(|&token| stream.push(token).unwrap()).collect();
        pieces.push(stream.rest().unwrap());
        pieces
    }

    #[test]
    fn characters_come_whole_however_their_bytes_are_split() {
        let text = "日本 👩‍👩‍👧 né\u{301}e 🙂";
        for tokenizer in [byte_tokenizer(), falling_back()] {
            let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
            let found = pieces(&tokenizer, &tokens);
            assert_eq!(found.concat(), text);
            let mut expected = vec![String::new(); text.len() + 1];
            text.char_indices().for_each(|(at, character)| expected[at + character.len_utf8() - 1] = character.to_string());
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn broken_bytes_are_replaced_as_soon_as_that_is_certain() {
        let tokenizer = byte_tokenizer();
        assert_eq!(pieces(&tokenizer, &[0xe4, 0xbd, u32::from(b'a')]), ["", "", "\u{fffd}a", ""]);
        assert_eq!(pieces(&tokenizer, &[u32::from(b'a'), 0xe4, 0xbd]), ["a", "", "", "\u{fffd}"]);
    }

    #[test]
    fn pieces_add_up_to_the_whole_text() {
        let tokens =
            [[0xe4, 0x41, 256, 0xff], [0xf0, 0x9f, 0x98, 0x80], [0x20, 257, 256, 0xe2], [257, 0x82, 0xac, 0xc3]].concat();
        for from in 0..tokens.len() {
            for to in from..=tokens.len() {
                let tokens = &tokens[from..to];
                assert_eq!(
                    pieces(&byte_tokenizer(), tokens).concat(),
                    byte_tokenizer().decode(tokens, true).unwrap(),
                    "{tokens:?}"
                );
            }
        }
    }

    #[test]
    fn a_leading_space_is_lost_only_at_the_beginning() {
        assert_eq!(pieces(&falling_back(), &[256, 259, 257, 259, 256]), ["Hello", "", " world", "", " Hello", ""]);
        assert_eq!(pieces(&falling_back(), &[259, 256, 0xe2, 0x82, 0xac, 257]), ["", "Hello", "", "", "€", " world", ""]);
    }
}
